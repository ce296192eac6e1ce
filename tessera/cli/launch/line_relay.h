// LineRelay: copies the output of one rank to the launcher's own output, with a prefix before each line, and unchanged to a log. Lines of
// different ranks do not mix.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>

#include "tessera/base/fd.h"
#include "tessera/cli/launch/rank_log.h"
#include "tessera/cli/output.h"

namespace tessera::cli {

/// Remembers the lines that ranks have printed lately, so that a line which all ranks print is shown once.
class RecentLines {
 public:
  /// If another rank has just printed this line, returns that rank; otherwise remembers the line. Short lines may be equal by chance, so a
  /// short line is looked up only if this rank's line before it was a repetition, too (`goes_on`).
  std::optional<int> printed_by_another(int rank, const std::string& line, bool goes_on);

 private:
  struct Line {
    int rank;
    std::string text;
    std::chrono::steady_clock::time_point when;
  };
  std::deque<Line> lines_;
};

class LineRelay {
 public:
  /// Reads from a pipe. Copies only the last state of a line that the rank overwrites by carriage returns. Without a target, lines go only
  /// to the log. With `recent`, lines that another rank has just printed are not copied.
  LineRelay(Fd source, Output* target, std::string prefix, LogFile log, int rank, RecentLines* recent = nullptr);

  /// The descriptor to poll for input; -1 after the end of input, and while enough lines wait for the target. A rank that prints more then
  /// blocks, because its pipe is full.
  int source() const { return has_room() ? source_.get() : -1; }

  /// Reads some of the input that is there, and hands complete lines to the target if the target is idle.
  void pump();

  /// Reads what the pipe holds now, ends the last line, and hands everything to the target. Processes that the rank has left behind may
  /// keep the pipe open; their later output is not copied.
  void finish();

  /// The last few lines, without the prefix.
  const std::deque<std::string>& last_lines() const { return last_lines_; }

  const LogFile& log() const { return log_; }

 private:
  bool has_room() const;
  size_t read_some();
  void take(std::string_view text);
  void end_line();

  Fd source_;
  Output* target_;
  std::string prefix_;
  LogFile log_;
  std::string line_;   // the current line so far
  std::string ready_;  // complete lines, to be written
  std::deque<std::string> last_lines_;
  int rank_;
  RecentLines* recent_;
  std::optional<int> repeats_;  // if the last line was a repetition, the rank that had printed it before
};

}  // namespace tessera::cli
