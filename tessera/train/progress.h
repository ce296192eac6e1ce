// Progress: shows the progress of training, as a bar on a terminal and as plain lines elsewhere.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/train/display.h"
#include "tessera/train/progress_line.h"
#include "tessera/train/rate.h"
#include "tessera/train/value.h"

namespace tessera::train {

struct ProgressOptions {
  std::string title = {};        // "epoch 1/2"
  int64_t steps = 0;             // total number of steps, for the percentage and the remaining time; 0 if unknown
  int64_t start = 0;             // number of steps that an earlier run has done
  int64_t samples_per_step = 0;  // of all ranks together; with 0 the rate is in steps per second
  int64_t line_every = 100;      // steps between lines if there is no terminal; 0 for the last line only
  int rank = 0;                  // only rank 0 shows anything
};

/// The constructor shows the first state. The destructor ends the line, so that an exception leaves a clean terminal with the last state.
class Progress {
 public:
  explicit Progress(ProgressOptions options, Display display = Display::of(stdout));
  Progress(Progress&&) = delete;
  ~Progress();

  /// Reports that `step` steps are done. It is cheap: a bar is drawn at most ten times a second.
  void update(int64_t step, Values values = {});

  /// Leaves the last state as one line, with the mean rate and the total time.
  void finish();

 private:
  ProgressState state() const;
  void draw(std::string_view end);

  ProgressOptions options_;
  Display display_;
  Display::Clock::time_point begun_, drawn_;
  int64_t step_;
  Values values_;
  Rate rate_;
  enum class Phase { Begun, Running, Finished } phase_ = Phase::Begun;
};

}  // namespace tessera::train
