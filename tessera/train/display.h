// Where progress is shown: what a terminal is asked, and what a test answers in its place.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <string_view>

namespace tessera::train {

/// What a bar is drawn with.
enum class Glyphs { Ascii, Blocks };

/// Blocks if the environment's locale is one of UTF-8.
Glyphs glyphs_of_locale();

struct Display {
  using Clock = std::chrono::steady_clock;

  std::function<void(std::string_view)> write;
  std::function<std::optional<int>()> columns;  // of the terminal, now; nothing where lines are wanted
  std::function<Clock::time_point()> now = Clock::now;
  Glyphs glyphs = Glyphs::Ascii;

  /// A bar where the file is a terminal that can move its cursor, lines elsewhere. What can't be written is lost: nobody's training ends
  /// for that.
  static Display of(std::FILE* file);
};

}  // namespace tessera::train
