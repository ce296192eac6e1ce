// Runs tasks one after the other in a thread of its own, in the order in which they came.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/comm/work.h"

namespace tessera {

class Queue {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  ~Queue();  // finishes what was given to it

  /// An exception of the task comes out of the Work's wait().
  Work run(std::function<void()> task);
  /// Whether all tasks ended within the limit.
  bool wait_until_idle(std::chrono::milliseconds limit);
  /// Tells whether a task waits or runs, also when the queue is gone.
  std::function<bool()> watch() const;
  /// Whether somebody waits for a task that has not ended.
  bool waited_for() const { return shared_->waiting > 0; }

 private:
  struct Task;
  /// Outlives the queue where its last owner is a task of its own.
  struct Shared {
    Shared() { tasks.reserve(64); }
    std::mutex mutex;
    std::condition_variable arrived, finished;
    std::vector<std::shared_ptr<Task>> tasks;  // few
    bool busy = false;
    bool closing = false;
    std::atomic<int> waiting = 0;  // threads, for tasks
  };
  static void serve(const std::shared_ptr<Shared>& shared);

  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::thread thread_;  // started by the first task
};

}  // namespace tessera
