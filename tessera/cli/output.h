// The launcher's standard output and standard error. Writing to them never blocks, so that the launcher can still handle signals, ranks
// that end, and time limits.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/fd.h"

namespace tessera::cli {

/// Standard output or standard error of this process. Keeps text that can't be written yet, and drops text that can never be written.
class Output {
 public:
  explicit Output(int stream);

  /// Whether everything has been written or dropped.
  bool idle() const { return pending_.empty(); }
  void write(std::string_view text);
  /// Writes what can be written without waiting.
  void flush();
  /// The descriptor for poll(): it becomes writable when flush() can continue.
  int descriptor() const { return own_ ? own_.get() : stream_; }
  bool is_terminal() const { return kind_ == Kind::Terminal; }
  /// The text to write before a line, so that the line overwrites the progress bar that a rank may have drawn on this terminal. The rank
  /// draws the bar again. Empty if this is not a terminal.
  std::string fresh_line() const;
  /// Returns a message such as "lost 12 bytes: No space left on device"; nothing if all was written, or was dropped because the reader of a
  /// pipe or terminal is gone.
  std::optional<std::string> trouble() const;

 private:
  ssize_t write_some() const;

  enum class Kind { File, Pipe, Socket, Terminal };
  int stream_;
  Kind kind_ = Kind::File;
  Fd own_;  // a pipe or terminal opened again, non-blocking; other processes share the original, which must stay blocking
  std::string pending_;
  uint64_t lost_ = 0;  // how many bytes were lost
  int reason_ = 0;     // errno of the first loss
};

/// Both outputs of this process. If they lead to the same file they are one object, so that no line is written into the middle of another.
class Console {
 public:
  Console();

  Output& out() { return out_; }
  Output& err() { return err_ ? *err_ : out_; }
  /// Waits until everything has been written or dropped.
  void finish();

 private:
  Output out_;
  std::optional<Output> err_;
};

/// Opens /dev/null in place of standard streams that are closed. Otherwise the next file to be opened would become a standard stream.
void occupy_standard_streams();

}  // namespace tessera::cli
