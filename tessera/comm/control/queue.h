// Runs tasks one after the other, in the order of the calls, in a thread of its own.
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
  /// While the queue is empty, its thread calls `watch` again and again until that returns false, and resumes after the next task.
  explicit Queue(std::function<bool()> watch = [] { return false; }) : shared_(std::make_shared<Shared>(std::move(watch))) {}
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  ~Queue();  // runs the remaining tasks first

  /// The Work is done when the task has returned; on a device, the results are ready after the event that the task returned. wait() throws
  /// the exception that the task threw.
  Work run(std::function<Event()> task);
  /// Waits until all tasks have ended. Returns false if they have not ended within the limit.
  bool wait_until_idle(std::chrono::milliseconds limit);
  /// A function that tells whether any task is queued or running. It may be called after the queue is destroyed.
  std::function<bool()> busy() const;
  /// Whether a thread waits for a task that has not ended.
  bool waited_for() const { return shared_->waiting > 0; }

 private:
  struct Task;
  /// Outlives the queue if one of the queue's own tasks destroys it.
  struct Shared {
    explicit Shared(std::function<bool()> watch) : watch(std::move(watch)) { tasks.reserve(64); }
    const std::function<bool()> watch;
    std::mutex mutex;
    std::condition_variable arrived, finished;
    std::vector<std::shared_ptr<Task>> tasks;  // few, so a vector is enough
    bool busy = false;
    bool watches = false;  // whether watch() is to be called
    bool closing = false;
    std::atomic<int> waiting = 0;  // how many threads wait for tasks
  };
  static void serve(const std::shared_ptr<Shared>& shared);

  const std::shared_ptr<Shared> shared_;
  std::thread thread_;  // started by the first task
};

}  // namespace tessera
