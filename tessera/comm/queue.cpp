#include "tessera/comm/queue.h"

#include <exception>

#include "tessera/base/error.h"
#include "tessera/base/log.h"

namespace tessera {

struct Queue::Task : Work::State {
  explicit Task(std::function<void()> body) : body(std::move(body)) {}

  ~Task() override {
    if (error && !seen) log(LogLevel::Warning, "an operation that nobody waited for has failed: " + message_of(error));
  }

  void wait() override {
    std::unique_lock lock(mutex);
    seen = true;
    finished.wait(lock, [&] { return is_done; });
    if (error) std::rethrow_exception(error);
  }

  bool done() const override {
    std::lock_guard lock(mutex);
    return is_done;
  }

  void execute() {
    std::exception_ptr raised;
    try {
      body();
    } catch (...) {
      raised = std::current_exception();
    }
    body = {};  // lets go of the buffers before anybody is told
    std::lock_guard lock(mutex);
    error = raised;
    is_done = true;
    finished.notify_all();
  }

  std::function<void()> body;
  mutable std::mutex mutex;
  std::condition_variable finished;
  std::exception_ptr error;
  bool is_done = false;
  bool seen = false;  // somebody has waited
};

Queue::~Queue() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  arrived_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Work Queue::run(std::function<void()> task) {
  auto entry = std::make_shared<Task>(std::move(task));
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(entry);
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  }
  arrived_.notify_one();
  return Work(std::move(entry));
}

bool Queue::wait_until_idle(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, limit, [&] { return tasks_.empty() && !busy_; });
}

void Queue::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [&] { return closing_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    task->execute();
    task.reset();
    lock.lock();
    busy_ = false;
    finished_.notify_all();
  }
}

}  // namespace tessera
