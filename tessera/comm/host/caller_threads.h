// Whether several threads of the program use one group. If so, a deadlock can't be told from a thread that waits while another one works.
#pragma once

#include <atomic>
#include <functional>
#include <thread>

namespace tessera {

enum class Callers { OneThread, SeveralThreads };

class CallerThreads {
 public:
  /// Records that the calling thread uses the group.
  void note() {
    const auto id = std::hash<std::thread::id>()(std::this_thread::get_id());
    size_t first = 0;
    if (!first_.compare_exchange_strong(first, id) && first != id) several_ = true;
  }

  Callers callers() const { return several_ ? Callers::SeveralThreads : Callers::OneThread; }

 private:
  std::atomic<size_t> first_ = 0;
  std::atomic<bool> several_ = false;
};

}  // namespace tessera
