#include "tessera/comm/control/queue.h"

#include <exception>

#include "tessera/base/error.h"
#include "tessera/base/log.h"

namespace tessera {
namespace {

constexpr auto kBetweenWatches = std::chrono::milliseconds(100);

}  // namespace

struct Queue::Task : Work::State {
  Task(std::function<Event()> body, std::shared_ptr<Shared> queue) : body(std::move(body)), queue(std::move(queue)) {}

  ~Task() override {
    if (error && !seen) log(LogLevel::Warning, "an operation that nobody waited for has failed: " + message_of(error));
  }

  void wait() override {
    std::unique_lock lock(mutex);
    seen = true;
    if (!is_done) {
      queue->waiting++;
      finished.wait(lock, [&] { return is_done; });
      queue->waiting--;
    }
    if (error) std::rethrow_exception(error);
  }

  Event ready_event() const override { return ready; }

  bool done() const override {
    std::lock_guard lock(mutex);
    return is_done;
  }

  void execute() {
    std::exception_ptr raised;
    Event end;
    try {
      end = body();
    } catch (...) {
      raised = std::current_exception();
    }
    body = {};  // releases the buffers before waiting threads continue
    std::lock_guard lock(mutex);
    error = raised;
    ready = std::move(end);
    is_done = true;
    finished.notify_all();
  }

  std::function<Event()> body;
  const std::shared_ptr<Shared> queue;
  mutable std::mutex mutex;
  std::condition_variable finished;
  std::exception_ptr error;
  Event ready;
  bool is_done = false;
  bool seen = false;  // a thread has waited for the task
};

Queue::~Queue() {
  {
    std::lock_guard lock(shared_->mutex);
    shared_->closing = true;
  }
  shared_->arrived.notify_all();
  if (!thread_.joinable()) return;
  // A task may hold the last reference to the queue's owner. Then this destructor runs in the queue's own thread, which can't be joined.
  thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
}

Work Queue::run(std::function<Event()> task) {
  auto entry = std::make_shared<Task>(std::move(task), shared_);
  {
    std::lock_guard lock(shared_->mutex);
    shared_->tasks.push_back(entry);
    if (!thread_.joinable()) thread_ = std::thread([shared = shared_] { serve(shared); });
  }
  shared_->arrived.notify_one();
  return Work(std::move(entry));
}

bool Queue::wait_until_idle(std::chrono::milliseconds limit) {
  std::unique_lock lock(shared_->mutex);
  return shared_->finished.wait_for(lock, limit, [&] { return shared_->tasks.empty() && !shared_->busy; });
}

std::function<bool()> Queue::busy() const {
  return [shared = shared_] {
    const std::lock_guard lock(shared->mutex);
    return shared->busy || !shared->tasks.empty();
  };
}

void Queue::serve(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  for (;;) {
    const auto is_called = [&] { return shared->closing || !shared->tasks.empty(); };
    while (shared->watches && !shared->arrived.wait_for(lock, kBetweenWatches, is_called)) {
      lock.unlock();
      const bool again = shared->watch();
      lock.lock();
      shared->watches = again;
    }
    shared->arrived.wait(lock, is_called);
    if (shared->tasks.empty()) return;
    auto task = std::move(shared->tasks.front());
    shared->tasks.erase(shared->tasks.begin());
    shared->busy = true;
    lock.unlock();
    task->execute();
    task.reset();
    lock.lock();
    shared->busy = false;
    shared->watches = true;
    shared->finished.notify_all();
  }
}

}  // namespace tessera
