#include "tessera/cli/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "tessera/base/env.h"

namespace tessera::cli {
namespace {

bool is_same_file(int one, int other) {
  struct stat first = {}, second = {};
  return ::fstat(one, &first) == 0 && ::fstat(other, &second) == 0 && first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

}  // namespace

Output::Output(int stream) : stream_(stream) {
  struct stat status = {};
  ::fstat(stream, &status);
  kind_ = ::isatty(stream) != 0      ? Kind::Terminal
          : S_ISFIFO(status.st_mode) ? Kind::Pipe
          : S_ISSOCK(status.st_mode) ? Kind::Socket
                                     : Kind::File;
  if (kind_ == Kind::Terminal || kind_ == Kind::Pipe) {
    own_ = Fd(::open(fmt::format("/proc/self/fd/{}", stream).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  }
}

ssize_t Output::write_some() const {
  if (kind_ == Kind::Socket) return ::send(stream_, pending_.data(), pending_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (own_ || kind_ == Kind::File) return ::write(descriptor(), pending_.data(), pending_.size());
  // The stream could not be opened again, because it belongs to another user. A pipe that is ready takes this much without blocking.
  constexpr size_t kAlwaysFits = 4096;
  pollfd ready{.fd = stream_, .events = POLLOUT, .revents = 0};
  if (::poll(&ready, 1, 0) == 0) {
    errno = EAGAIN;
    return -1;
  }
  return ::write(stream_, pending_.data(), std::min(pending_.size(), kAlwaysFits));
}

void Output::write(std::string_view text) {
  pending_ += text;
  flush();
}

void Output::flush() {
  while (!pending_.empty()) {
    const auto count = write_some();
    if (count >= 0) {
      pending_.erase(0, static_cast<size_t>(count));
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return;
    const bool reader_has_gone = errno == EPIPE || errno == ECONNRESET || (errno == EIO && kind_ == Kind::Terminal);
    if (!reader_has_gone) {
      if (lost_ == 0) reason_ = errno;
      lost_ += pending_.size();
    }
    pending_.clear();
  }
}

std::string Output::fresh_line() const {
  return is_terminal() && env("TERM").value_or("dumb") != "dumb" ? "\r\033[K" : "";
}

std::optional<std::string> Output::trouble() const {
  if (lost_ == 0) return std::nullopt;
  return fmt::format("lost {} bytes: {}", lost_, std::strerror(reason_));
}

Console::Console() : out_(STDOUT_FILENO) {
  ::signal(SIGPIPE, SIG_IGN);  // a reader that is gone must not end this process
  if (!is_same_file(STDOUT_FILENO, STDERR_FILENO)) err_.emplace(STDERR_FILENO);
}

void Console::finish() {
  for (;;) {
    std::vector<pollfd> waiting;
    for (auto* output : {&out(), &err()}) {
      output->flush();
      if (!output->idle()) waiting.push_back({.fd = output->descriptor(), .events = POLLOUT, .revents = 0});
    }
    if (waiting.empty()) return;
    ::poll(waiting.data(), waiting.size(), -1);
  }
}

void occupy_standard_streams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; stream++) {
    // Opened for reading only, so that writing to it fails and counts as lost.
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
  }
}

}  // namespace tessera::cli
