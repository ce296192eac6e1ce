// Copies the output of one rank to the launcher's own output, with a prefix before each line, and to a log as it is. Lines of different
// ranks do not mix.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>

#include "tessera/base/fd.h"
#include "tessera/cli/launch/rank_log.h"
#include "tessera/cli/output.h"

namespace tessera::cli {

/// The lines that ranks have printed of late, so that a line which all of them print is shown once.
class RecentLines {
 public:
  /// Returns another rank that has just printed this line. If there is none, the line is kept. Short lines may be the same by chance, so a
  /// short one is only looked up if the line before was the same (`goes_on`).
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
  /// Reads from a pipe. Of a line that was overwritten after carriage returns, only the last state is copied. Without a target, lines only
  /// go to the log. With `recent`, lines that another rank has just printed are not copied.
  LineRelay(Fd source, Output* target, std::string prefix, LogFile log, int rank, RecentLines* recent = nullptr);

  /// The descriptor to poll for input; -1 after the end, and while enough lines wait for the target. The rank then waits in its own pipe.
  int source() const { return has_room() ? source_.get() : -1; }

  /// Takes some of what can be read without waiting, and hands complete lines to the target if that is idle.
  void pump();

  /// Takes what the pipe holds now, ends the last line, and hands everything to the target. Processes that the rank has left behind may
  /// keep the pipe open; what they write from now on is not copied.
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
  std::optional<int> repeats_;  // the rank that has printed the same before
};

}  // namespace tessera::cli
