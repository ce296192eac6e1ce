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

/// Both ends of a pipe; they close when a program is executed.
struct Pipe {
  Fd read, write;
  Pipe();
};

class Process {
 public:
  /// Starts a program with this process's environment, changed by `environment`. With `capture`, its output goes to a pipe.
  /// The kernel kills the child when the thread that started it ends, also when that happens by kill -9. The child calls `prepare` just
  /// before it becomes the program: async-signal-safe calls only.
  enum class Output { Inherit, Capture };
  Process(std::vector<std::string> command, const std::map<std::string, std::string>& environment, Output output = Output::Inherit,
          const std::function<void()>& prepare = {});
  Process(Process&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), output_(std::exchange(other.output_, -1)), status_(std::exchange(other.status_, {})) {}
  Process& operator=(Process&&) = delete;
  ~Process();  // kills and reaps what still runs

  pid_t pid() const { return pid_; }

  /// Exit status as a shell gives it (128 + n after signal n), or nothing if the child still runs after the limit.
  std::optional<int> wait(std::chrono::milliseconds limit);

  /// All that the child prints until it closes its output. Only with Output::Capture, once.
  std::string read_output();

 private:
  pid_t pid_ = -1;
  int output_ = -1;
  std::optional<int> status_;
};

/// The running program's own file.
std::string this_program();

}  // namespace tessera
