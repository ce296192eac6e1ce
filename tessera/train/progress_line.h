// Formats progress as text. The functions are pure: the same state gives the same text.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/train/display.h"
#include "tessera/train/value.h"

namespace tessera::train {

struct ProgressState {
  std::string title = {};
  int64_t step = 0;
  int64_t steps = 0;  // 0 if unknown
  Values values = {};
  std::optional<double> rate = {};  // units per second
  std::string_view unit = "steps";  // the unit of the rate
  std::optional<double> left = {};  // remaining seconds
  std::optional<double> took = {};  // total seconds; only when training has finished
};

/// "epoch 1/2  42% ▕███▎    ▏ 788/1875  loss 0.412  9.8k samples/s  0:14 left", in at most `columns` columns. If there are too few, the bar
/// shrinks first. Then all values but the first are left out, beginning with the last, so that a short bar remains; then the bar, time and
/// rate, and the first value. Items are never truncated, because half a number would be another number.
std::string render_bar(const ProgressState& state, int columns, Glyphs glyphs);

/// "epoch 1/2 step 800/1875 loss 0.412 9.8k samples/s 0:14 left"
std::string render_line(const ProgressState& state);

/// A bar of so many columns with its edges, filled up to a share from 0 to 1.
std::string share_bar(double share, int columns, Glyphs glyphs);

/// For example 9.8k, 123, 0.05
std::string short_number(double number);

/// For example 0:14, 1:02:03
std::string short_time(double seconds);

}  // namespace tessera::train
