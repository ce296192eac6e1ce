#include "tessera/base/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <thread>

#include "tessera/base/error.h"

namespace tessera {
namespace {

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (auto& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; entry++) {
    const std::string text = *entry;
    if (!changes.contains(text.substr(0, text.find('=')))) result.push_back(text);
  }
  for (const auto& [name, value] : changes) result.push_back(name + "=" + value);
  return result;
}

/// Why a program was not started, with the way out.
std::string why_not_started(const std::string& program, int reason) {
  std::error_code ignored;
  const bool is_here = std::filesystem::exists(program, ignored), has_path = program.find('/') != std::string::npos;
  const auto* const python = program.ends_with(".py") ? "python3 " : nullptr;
  const std::string why = std::strerror(reason);
  if (std::filesystem::is_directory(program, ignored)) return why + "; it is a folder: name the program in it";
  if (reason == EACCES && std::filesystem::is_regular_file(program, ignored))
    return why + (python != nullptr ? "; start it as python3 " : "; make it executable: chmod +x ") + program;
  if (reason != ENOENT) return why;
  if (is_here && has_path) return why + "; is the interpreter there that its first line names?";
  if (is_here) return why + " in PATH; write " + (python != nullptr ? python : "./") + program;
  if (program.find(' ') != std::string::npos) return why + "; leave out the quotes around the program and its arguments";
  return why + (has_path ? "; is it built, and is the path right?" : " in PATH; write the path of the program");
}

}  // namespace

Pipe::Pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw IoError("can't make a pipe for a child process: {}", std::strerror(errno));
  read = Fd(ends[0]);
  write = Fd(ends[1]);
}

Process::Process(std::vector<std::string> command, const std::map<std::string, std::string>& environment, Output output,
                 const std::function<void()>& prepare) {
  auto variables = merged_environment(environment);
  // Everything that allocates happens before the fork: after it, only async-signal-safe calls are allowed.
  const auto argv = pointers(command);
  const auto envp = pointers(variables);
  std::optional<Pipe> captured;
  if (output == Output::Capture) captured.emplace();
  Pipe failure;  // closed by a successful exec; otherwise the child writes errno to it

  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw IoError("can't start '{}': {}", command.front(), std::strerror(errno));
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);  // the parent died before the line above
    if (captured) {
      ::dup2(captured->write.get(), STDOUT_FILENO);
      ::dup2(captured->write.get(), STDERR_FILENO);
    }
    if (prepare) prepare();
    ::execvpe(argv[0], argv.data(), envp.data());
    const int reason = errno;
    [[maybe_unused]] auto written = ::write(failure.write.get(), &reason, sizeof reason);
    ::_exit(127);
  }
  failure.write = Fd();
  int reason = 0;
  ssize_t told = 0;
  do told = ::read(failure.read.get(), &reason, sizeof reason);
  while (told < 0 && errno == EINTR);
  if (told == sizeof reason) {
    wait(std::chrono::seconds(5));
    throw IoError("can't start '{}': {}", command.front(), why_not_started(command.front(), reason));
  }
  if (captured) output_ = std::move(captured->read);
}

Process::~Process() {
  if (pid_ < 0 || status_) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

std::optional<int> Process::wait(std::chrono::milliseconds limit) {
  if (pid_ < 0) throw UsageError("this Process was moved from; wait for the one that it moved to");
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!status_) {
    int raw = 0;
    const pid_t reaped = ::waitpid(pid_, &raw, WNOHANG);
    if (reaped == pid_) {
      status_ = WIFSIGNALED(raw) ? 128 + WTERMSIG(raw) : WEXITSTATUS(raw);
    } else if (reaped < 0 && errno != EINTR) {
      throw IoError("can't wait for process {}: {}", pid_, std::strerror(errno));
    } else if (std::chrono::steady_clock::now() >= end) {
      return std::nullopt;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  return status_;
}

std::string read_to_end(const Fd& from, const std::function<void()>& before) {
  std::string text;
  char buffer[4096];
  for (;;) {
    if (before) before();
    const auto count = ::read(from.get(), buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return text;
    text.append(buffer, static_cast<size_t>(count));
  }
}

void become(const std::vector<std::string>& command) {
  std::vector<char*> words;
  for (const auto& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execvp(words.front(), words.data());
  throw IoError("can't start '{}': {}", command.front(), why_not_started(command.front(), errno));
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return ::gethostname(name.data(), HOST_NAME_MAX) == 0 && name[0] != '\0' ? name.data() : "localhost";
}

std::string this_program() {
  return std::filesystem::read_symlink("/proc/self/exe");
}

}  // namespace tessera
