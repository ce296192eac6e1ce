// Waits until a word of shared memory changes, across threads and processes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace tessera {

/// Returns when the word is no longer `seen`, after a wake, or after `most`. It may also return early, so the caller must check the word.
inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds most) {
  const timespec span{.tv_sec = static_cast<time_t>(most.count() / 1'000'000'000),
                      .tv_nsec = static_cast<long>(most.count() % 1'000'000'000)};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &span, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tessera
