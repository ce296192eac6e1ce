// Blocks SIGPIPE while messages are sent over sockets whose other end may be dead.
#pragma once

#include <signal.h>

namespace tessera {

/// Blocks SIGPIPE in this thread, and in threads that it starts, until destruction. Gloo relies on SIGPIPE being ignored, as Python does;
/// in a C++ program the signal would end the process without a message.
class NoSigpipe {
 public:
  NoSigpipe() {
    ::sigemptyset(&only_);
    ::sigaddset(&only_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &only_, &before_);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;
  ~NoSigpipe() {
    if (::sigismember(&before_, SIGPIPE) == 0) {
      const timespec now{};
      ::sigtimedwait(&only_, nullptr, &now);  // discards a pending SIGPIPE
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t only_, before_;
};

}  // namespace tessera
