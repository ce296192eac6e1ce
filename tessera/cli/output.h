// The launcher's own outputs. Writing to them never waits, so the launcher keeps serving signals, deaths and time limits.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/fd.h"

namespace tessera::cli {

/// Standard output or standard error of this process. What can't be written at once is kept. What can't be written at all is dropped.
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
  /// The text that must precede a line of one's own, to overwrite the progress bar that a rank may be drawing on this terminal. The rank
  /// will draw it again. Empty if this is not a terminal.
  std::string fresh_line() const;
  /// "lost 12 bytes: No space left on device"; nothing if all was written, or if the reader of a pipe or terminal has gone.
  std::optional<std::string> trouble() const;

 private:
  ssize_t write_some() const;

  enum class Kind { File, Pipe, Socket, Terminal };
  int stream_;
  Kind kind_ = Kind::File;
  Fd own_;  // a pipe or terminal opened once more: other processes share the original, so it can't be made non-blocking
  std::string pending_;
  uint64_t lost_ = 0;  // bytes
  int reason_ = 0;     // errno of the first loss
};

/// Both outputs. They are one object where they lead to the same file, so that no line is written into the middle of another.
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

/// Opens /dev/null in place of standard streams that are closed. Otherwise the next file that is opened would become one of them.
void occupy_standard_streams();

}  // namespace tessera::cli
