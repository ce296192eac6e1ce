// Progress: shows how far training is, as a bar on a terminal and as plain lines elsewhere.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/train/display.h"
#include "tessera/train/progress_line.h"
#include "tessera/train/rate.h"
#include "tessera/train/value.h"

namespace tessera::train {

/// The display after the work is done.
enum class AtEnd {
  Stays,     // shows the last state, as one line
  Vanishes,  // leaves nothing, for short work such as an evaluation; without a terminal, nothing is shown at all
};

struct ProgressOptions {
  std::string title = {};         // "epoch 1/2"
  int64_t steps = 0;              // total number of steps, for the percentage and the remaining time; 0 if unknown
  int64_t start = 0;              // number of steps that an earlier run has done
  int64_t items_per_step = 0;     // items of all ranks together; with 0, the rate is in steps per second
  std::string items = "samples";  // or "tokens"
  int64_t line_every = 100;       // steps between lines if there is no terminal; 0 for the last line only
  AtEnd at_end = AtEnd::Stays;
  int rank = 0;  // only rank 0 shows anything
};

/// The constructor shows the first state. The destructor ends the line, so that an exception leaves a clean terminal with the last state.
class Progress {
 public:
  explicit Progress(ProgressOptions options, Display display = Display::of(stdout));
  Progress(Progress&&) = delete;
  ~Progress();

  /// Shows that `step` steps are done. Cheap, because a bar is drawn at most ten times a second.
  void update(int64_t step, Values values = {});

  /// Prints a line of the program, above the bar if there is one. Ranks other than 0 print nothing.
  void say(std::string_view text);

  /// Leaves the last state as one line, with the mean rate and the total time, or nothing with AtEnd::Vanishes.
  void finish();

 private:
  ProgressState state() const;
  void draw(std::string_view end);
  bool has_bar() const { return phase_ != Phase::Finished && display_.columns().has_value(); }

  ProgressOptions options_;
  Display display_;
  Display::Clock::time_point begun_, drawn_;
  int64_t step_;
  Values values_;
  Rate rate_;
  enum class Phase { Begun, Running, Finished } phase_ = Phase::Begun;
};

}  // namespace tessera::train
