#include "tessera/cli/watchdog.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/process.h"

namespace tessera::cli {

Watchdog::Watchdog(int groups) : size_(groups) {
  const auto bytes = sizeof(std::atomic<pid_t>) * static_cast<size_t>(size_);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw IoError(std::string("no memory to share with the watchdog: ") + std::strerror(errno));
  groups_ = static_cast<std::atomic<pid_t>*>(memory);  // fresh memory is zero: no groups
  Pipe pipe;
  pid_ = ::fork();
  if (pid_ < 0) throw IoError(std::string("can't start the watchdog: ") + std::strerror(errno));
  if (pid_ == 0) {
    ::setsid();  // so that signals to the launcher's process group do not reach it
    ::close(pipe.write.get());
    char nothing = 0;
    while (::read(pipe.read.get(), &nothing, 1) < 0 && errno == EINTR) {
    }
    for (int place = 0; place < size_; place++) {
      if (const pid_t group = groups_[place]; group > 0) ::kill(-group, SIGKILL);
    }
    ::_exit(0);
  }
  lifeline_ = std::move(pipe.write);
}

Watchdog::~Watchdog() {
  lifeline_ = Fd();
  ::waitpid(pid_, nullptr, 0);
  ::munmap(groups_, sizeof(std::atomic<pid_t>) * static_cast<size_t>(size_));
}

}  // namespace tessera::cli
