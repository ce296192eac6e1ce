// Copies the output of one rank to the launcher's own output, with a prefix before each line. Lines of different ranks do not mix.
#pragma once

#include <deque>
#include <string>

#include "tessera/base/fd.h"

namespace tessera::cli {

class LineRelay {
 public:
  /// Reads from a pipe, writes to `target`. Of a line that was overwritten after carriage returns, only the last state is copied.
  LineRelay(Fd source, int target, std::string prefix);

  int source() const { return source_.get(); }
  bool open() const { return static_cast<bool>(source_); }

  /// Copies some of what can be read without waiting; false if there was nothing. A last line without a line end gets one.
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
  std::string line_;   // the current line so far
  std::string ready_;  // complete lines, to be written
  std::deque<std::string> last_lines_;
};

}  // namespace tessera::cli
