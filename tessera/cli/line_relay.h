// The output of one rank on its way to ours: line by line, each behind a prefix and in one write, so that no line is torn by another.
#pragma once

#include <deque>
#include <string>

#include "tessera/base/fd.h"

namespace tessera::cli {

class LineRelay {
 public:
  /// Reads from a pipe, writes to `target`. A line that was overwritten by carriage returns passes as it looked last.
  LineRelay(Fd source, int target, std::string prefix);

  int source() const { return source_.get(); }
  bool open() const { return static_cast<bool>(source_); }

  /// Passes on some of what has come, without waiting; returns whether there was anything. A last line without an end gets one.
  bool pump();

  /// The last few lines, without the prefix.
  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  void take(std::string_view text);
  void end_line();
  void flush();

  Fd source_;
  int target_;
  std::string prefix_;
  std::string line_;   // what has come of the current one
  std::string ready_;  // whole lines to write
  std::deque<std::string> last_lines_;
};

}  // namespace tessera::cli
