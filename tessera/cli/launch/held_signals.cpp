#include "tessera/cli/launch/held_signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::cli {

HeldSignals::HeldSignals() {
  ::signal(SIGCHLD, SIG_DFL);  // if launch was started with SIGCHLD ignored, it could not get the exit status of ranks
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD}) {
    struct sigaction now{};
    // Leaves out a signal that launch was started with as ignored (nohup), because the ranks must ignore it, too.
    if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) ::sigaddset(&set, signal);
  }
  incoming = Fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!incoming) throw IoError("can't make a signalfd: {}", std::strerror(errno));
  ::pthread_sigmask(SIG_BLOCK, &set, &before);
}

HeldSignals::~HeldSignals() {
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::optional<int> HeldSignals::take() {
  signalfd_siginfo news{};
  if (::read(incoming.get(), &news, sizeof news) != sizeof news) return {};
  return static_cast<int>(news.ssi_signo);
}

void HeldSignals::stop_for_a_while() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTSTP);
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  ::raise(SIGTSTP);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

}  // namespace tessera::cli
