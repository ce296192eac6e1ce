#include "tessera/cli/held_signals.h"

#include <fmt/format.h>
#include <sys/signalfd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::cli {

HeldSignals::HeldSignals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD}) {
    struct sigaction now{};
    // If launch was started with a signal ignored (nohup), the ranks must ignore it too.
    if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) ::sigaddset(&set, signal);
  }
  incoming = Fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!incoming) throw IoError(fmt::format("no signalfd: {}", std::strerror(errno)));
  ::pthread_sigmask(SIG_BLOCK, &set, &before);
}

HeldSignals::~HeldSignals() {
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace tessera::cli
