// MpiThread: the one thread of this process that calls MPI for Tessera. It starts calls that do not wait, and tests them until they end.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tessera/comm/mpi/mpi_calls.h"

namespace tessera {

/// After a failure the thread calls MPI no more in this process: MPI can't take a call back, and would write to memory that the program has
/// freed since.
class MpiThread {
 public:
  using Clock = std::chrono::steady_clock;
  using Begin = std::function<MpiPending(MpiCalls&)>;
  /// A call of MPI. It keeps its tensors until it has ended; if that never happens, for good.
  struct Call {
    Begin begin;
    std::vector<at::Tensor> memory = {};
    MpiPending pending = {};
    bool ended = false;
  };

  /// The thread of this process, which is never destroyed. Throws ConfigError if there is no MPI.
  static MpiThread& instance();

  /// Starts MPI unless it has been started; what this starts ends with the process. Throws ConfigError if the program has started MPI
  /// without MPI_THREAD_MULTIPLE.
  void start_mpi(Clock::time_point end);

  /// Begins a call, after all calls of earlier start().
  std::shared_ptr<Call> start(Begin begin, std::vector<at::Tensor> memory = {});
  /// Returns whether the call has ended within the limit. Throws CommError if MPI has failed, or is not called any more.
  bool wait(const Call& call, std::chrono::milliseconds limit);
  /// Runs a function in the thread. Throws TimeoutError if it has not returned before `end`.
  template <class Function>
  auto run(std::string_view what, Clock::time_point end, Function function) {
    const auto result = std::make_shared<decltype(function(calls_))>();
    run_until(what, end, [result, function](MpiCalls& calls) {
      *result = function(calls);
      return MpiPending();
    });
    return *result;
  }

  /// Calls MPI no more. When it returns, no call is under way in the thread, unless one hangs there.
  void halt(std::string_view why);

 private:
  explicit MpiThread(MpiCalls& calls);
  void run_until(std::string_view what, Clock::time_point end, Begin begin);
  void serve();
  void rest(std::unique_lock<std::mutex>& lock);
  void finish();

  MpiCalls& calls_;
  std::mutex mutex_;  // guards the members below, and `ended` of all calls
  std::condition_variable wake_, changed_;
  std::vector<std::shared_ptr<Call>> fresh_, pending_;  // pending_ is the thread's own
  bool has_mpi_ = false;                                // MPI has been started, so it needs calls now and then
  bool calling_ = false;                                // the thread is in MPI
  int quiet_rounds_ = 0;                                // how often the thread has looked since a call began or ended
  std::string halted_;
  std::thread::id id_;
};

}  // namespace tessera
