// How far training is: a bar on a terminal, plain lines elsewhere.
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
  int64_t steps = 0;             // of the whole, for the share and the time that is left; 0 if nobody knows
  int64_t start = 0;             // already done by an earlier run
  int64_t samples_per_step = 0;  // of all ranks together; 0 shows steps per second
  int64_t line_every = 100;      // steps between lines where there is no terminal; 0 for the last line only
  int rank = 0;                  // only rank 0 is heard
};

/// Begins to show when it is made and ends its line when it goes, so an exception in between leaves a clean terminal and the last state.
class Progress {
 public:
  explicit Progress(ProgressOptions options, Display display = Display::of(stdout));
  Progress(Progress&&) = delete;
  ~Progress();

  /// So many steps are done. Cheap: a bar is drawn at most ten times a second.
  void update(int64_t step, Values values = {});

  /// The last state stays as one line, with the mean rate and the time that it took.
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
