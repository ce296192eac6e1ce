// Display: the stream on which progress is shown, as functions that tests replace.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <string_view>

namespace tessera::train {

/// The characters that form a bar.
enum class Glyphs { Ascii, Blocks };

/// Returns Blocks if the environment sets a UTF-8 locale.
Glyphs glyphs_of_locale();

struct Display {
  using Clock = std::chrono::steady_clock;

  std::function<void(std::string_view)> write;
  std::function<std::optional<int>()> columns;  // the present width of the terminal; nothing if progress is shown as lines
  std::function<Clock::time_point()> now = Clock::now;
  Glyphs glyphs = Glyphs::Ascii;

  /// Shows a bar if the file is a terminal that can move its cursor, and lines otherwise. Ignores errors in writing, so that they can't end a
  /// training run.
  static Display of(std::FILE* file);
};

}  // namespace tessera::train
