// `tessera launch` as tests start it: with its output in pipes, or on a terminal.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/process.h"

namespace tessera::testing {

using Command = std::vector<std::string>;
using Environment = std::map<std::string, std::string>;

inline Command launch(const std::string& ranks, const Command& program, const Command& flags = {}) {
  const auto tessera = std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera";
  Command command = {tessera, "launch", "--nproc-per-node", ranks};
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), program.begin(), program.end());
  return command;
}

inline Command shell(const std::string& script) {
  return {"sh", "-c", script};
}

inline std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  for (;;) {
    const auto count = ::read(fd, buffer, sizeof buffer);
    if (count <= 0) return text;  // a terminal ends with an error
    text.append(buffer, static_cast<size_t>(count));
  }
}

inline std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

/// A launcher that runs, with standard output and standard error in pipes.
class Launched {
 public:
  explicit Launched(const Command& command, const Environment& environment = {})
      : process_(command, environment, {}, [this] {
          ::setpgid(0, 0);  // makes a process group, as a shell does, so that Ctrl-Z can stop the launcher
          ::dup2(out_.write.get(), STDOUT_FILENO);
          ::dup2(err_.write.get(), STDERR_FILENO);
        }) {
    out_.write = Fd();
    err_.write = Fd();
  }

  pid_t pid() const { return process_.pid(); }

  std::string read_line() {
    std::string line;
    read_line(out_, line);
    return line;
  }
  /// Reads standard error up to the line that has this text. False if there is none.
  bool says(const std::string& text) {
    for (std::string line; read_line(err_, line);) {
      if (line.find(text) != std::string::npos) return true;
    }
    return false;
  }

  void stop_reading() {
    out_.read = Fd();
    err_.read = Fd();
  }

  struct Ended {
    int status;
    std::string out, err;
  };
  Ended end() {
    auto err = std::async(std::launch::async, [this] { return read_all(err_.read.get()); });
    auto out = read_all(out_.read.get());
    return {.status = process_.wait(std::chrono::seconds(20)).value_or(-1), .out = std::move(out), .err = err.get()};
  }

 private:
  /// Returns false at the end of the output.
  static bool read_line(const Pipe& pipe, std::string& line) {
    line.clear();
    char letter = 0;
    while (::read(pipe.read.get(), &letter, 1) == 1) {
      if (letter == '\n') return true;
      line += letter;
    }
    return !line.empty();
  }

  Pipe out_, err_;
  Process process_;
};

inline Launched::Ended run(const std::string& ranks, const Command& program, const Environment& environment = {},
                           const Command& flags = {}) {
  return Launched(launch(ranks, program, flags), environment).end();
}

/// State of a process as ps shows it: 'T' for stopped; 'Z', or nothing at all, once it has ended.
inline char state(const std::string& pid) {
  std::ifstream stat("/proc/" + pid + "/stat");
  std::string text;
  std::getline(stat, text);
  const auto name_end = text.rfind(')');
  return name_end == std::string::npos ? 'Z' : text[name_end + 2];
}

inline bool comes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 6000; i++) {  // for a minute: only a test that hangs reaches the end
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

inline bool ends(const std::string& pid) {
  return comes_true([&] { return state(pid) == 'Z'; });
}

/// "[rank 1] 12 34" -> {"12", "34"}
inline Command numbers_in(const std::string& line) {
  std::istringstream words(line.substr(line.find(']') + 1));
  return {std::istream_iterator<std::string>(words), {}};
}

/// A launcher on a terminal of its own, on which somebody types.
struct OnTerminal {
  Fd keyboard;
  Process process;

  explicit OnTerminal(const Command& command, const Environment& environment = {})
      : keyboard(opened()), process(command, environment, {}, [name = std::string(::ptsname(keyboard.get()))] {
          ::setsid();
          const int terminal = ::open(name.c_str(), O_RDWR);  // opening it makes it the terminal of this session
          for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(terminal, stream);
        }) {}

  static Fd opened() {
    Fd master(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    ::grantpt(master.get());
    ::unlockpt(master.get());
    return master;
  }
  void wait_for(const std::vector<std::string>& texts) const {
    std::string seen;
    const auto is_seen = [&](const std::string& text) { return seen.find(text) != std::string::npos; };
    for (char letter = 0; !std::ranges::all_of(texts, is_seen) && ::read(keyboard.get(), &letter, 1) == 1;) seen += letter;
  }
  std::string screen() const { return read_all(keyboard.get()); }
};

}  // namespace tessera::testing
