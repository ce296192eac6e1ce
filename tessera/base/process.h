// A child process that never outlives its owner.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/fd.h"

namespace tessera {

/// Both ends of a pipe; they are closed on exec. Throws IoError.
struct Pipe {
  Fd read, write;
  Pipe();
};

/// Reads until the other end is closed. Calls `before` before each part.
std::string read_to_end(const Fd& from, const std::function<void()>& before = {});

class Process {
 public:
  /// Starts a program with this process's environment, changed by `environment`. With Output::Capture, its output goes to a pipe. The
  /// kernel kills the child when the thread that started it ends, even by kill -9. The child calls `prepare` just before exec, so
  /// `prepare` may only make async-signal-safe calls. Throws IoError if the program can't be started.
  enum class Output { Inherit, Capture };
  Process(std::vector<std::string> command, const std::map<std::string, std::string>& environment, Output output = Output::Inherit,
          const std::function<void()>& prepare = {});
  Process(Process&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), output_(std::move(other.output_)), status_(std::exchange(other.status_, {})) {}
  Process& operator=(Process&&) = delete;
  ~Process();  // kills and reaps the child if it still runs

  pid_t pid() const { return pid_; }

  /// The exit status as a shell reports it (128 + n after signal n), or nothing if the child still runs after the limit.
  std::optional<int> wait(std::chrono::milliseconds limit);

  /// Everything that the child prints until it closes its output. Requires Output::Capture; may be called once.
  std::string read_output() { return read_to_end(output_); }

 private:
  pid_t pid_ = -1;
  Fd output_;
  std::optional<int> status_;
};

/// Replaces this process by a program, with this process's environment. Throws IoError if the program can't be started.
[[noreturn]] void become(const std::vector<std::string>& command);

/// Name of this host.
std::string host_name();

/// Path of the running program.
std::string this_program();

}  // namespace tessera
