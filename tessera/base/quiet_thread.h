// Starts a thread of the library that handles no signals, because signals are for the program's threads.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace tessera {

template <class Body>
std::thread quiet_thread(Body&& body) {
  struct AllBlocked {
    sigset_t before;
    AllBlocked() {
      sigset_t all;
      ::sigfillset(&all);
      ::pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~AllBlocked() { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  };
  const AllBlocked inherited_by_it;
  return std::thread(std::forward<Body>(body));
}

}  // namespace tessera
