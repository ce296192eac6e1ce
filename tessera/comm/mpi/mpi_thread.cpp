#include "tessera/comm/mpi/mpi_thread.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/quiet_thread.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/host/bounded.h"
#include "tessera/comm/mpi/mpi_library.h"

namespace tessera {
namespace {

constexpr auto kMpiHangs = std::chrono::seconds(2);  // then a call that has not returned will not
// The thread looks for ended calls at once, and then after longer and longer pauses. It looks rarely if nobody waits for a call: MPICH aborts
// in MPI_Finalize if another thread is in MPI just then.
constexpr int kEagerRounds = 50;
constexpr std::chrono::microseconds kShortestMpiPause(20), kLongestMpiPause(1000), kShortestIdlePause(20'000), kLongestIdlePause(1'000'000);

}  // namespace

MpiThread& MpiThread::instance() {
  static auto& thread = *new MpiThread(mpi_calls());
  return thread;
}

MpiThread::MpiThread(MpiCalls& calls) : calls_(calls) {
  const std::lock_guard lock(mutex_);
  auto thread = quiet_thread([this] { serve(); });
  id_ = thread.get_id();
  thread.detach();
}

void MpiThread::start_mpi(Clock::time_point end) {
  enum class Owner { Program, Tessera, Nobody };
  const auto owner = run("MPI_Init_thread", end, [this](MpiCalls& calls) {
    if (has_mpi_) return Owner::Program;
    const bool is_ours = !calls.is_started();
    if (calls.is_finished()) return Owner::Nobody;
    if (is_ours) calls.start();
    if (is_ours ? !calls.one_thread_may_call() : !calls.any_thread_may_call()) return Owner::Nobody;
    calls.before_finish([this] {
      if (std::this_thread::get_id() != id_) halt("the program has called MPI_Finalize");
    });
    const std::lock_guard lock(mutex_);
    has_mpi_ = true;
    return is_ours ? Owner::Tessera : Owner::Program;
  });
  if (owner == Owner::Nobody) {
    throw ConfigError("MPI has ended, or does not let a thread of Tessera's call it; start it by MPI_Init_thread with MPI_THREAD_MULTIPLE");
  }
  if (owner == Owner::Tessera) std::atexit([] { instance().finish(); });
}

std::shared_ptr<MpiThread::Call> MpiThread::start(Begin begin, std::vector<at::Tensor> memory) {
  auto call = std::make_shared<Call>(Call{.begin = std::move(begin), .memory = std::move(memory)});
  const std::lock_guard lock(mutex_);
  fresh_.push_back(call);
  wake_.notify_one();
  return call;
}

bool MpiThread::wait(const Call& call, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return call.ended || !halted_.empty(); });
  if (halted_.empty()) return call.ended;
  changed_.wait_for(lock, kMpiHangs, [&] { return !calling_; });  // from then on, Tessera's thread does not move data of the call
  if (call.ended) return true;
  throw CommError("MPI can't be used: {}", halted_);
}

void MpiThread::run_until(std::string_view what, Clock::time_point end, Begin begin) {
  const auto call = start(std::move(begin));
  if (wait(*call, time_until(end))) return;
  halt(std::string(what) + " has not ended in time");
  throw TimeoutError("{} has not ended in time: have all ranks come to it?", what);
}

void MpiThread::halt(std::string_view why) {
  std::unique_lock lock(mutex_);
  if (halted_.empty()) halted_ = why;
  wake_.notify_one();
  changed_.notify_all();
  if (std::this_thread::get_id() != id_) changed_.wait_for(lock, kMpiHangs, [&] { return !calling_; });
}

void MpiThread::rest(std::unique_lock<std::mutex>& lock) {
  const auto is_needed = [&] { return !fresh_.empty() || !halted_.empty(); };
  if (!has_mpi_ && pending_.empty()) return wake_.wait(lock, is_needed);
  const bool is_awaited = std::ranges::any_of(pending_, [](const auto& call) { return call.use_count() > 1; });
  if (is_awaited && quiet_rounds_ < kEagerRounds) {
    lock.unlock();
    std::this_thread::yield();
    return lock.lock();
  }
  const int doublings = std::min(quiet_rounds_ - (is_awaited ? kEagerRounds : 0), 10);
  const auto pause = is_awaited ? std::min(kShortestMpiPause * (1 << doublings), kLongestMpiPause)
                                : std::min(kShortestIdlePause * (1 << doublings), kLongestIdlePause);
  wake_.wait_for(lock, pause, is_needed);
}

void MpiThread::serve() {
  std::unique_lock lock(mutex_);
  while (halted_.empty()) {
    rest(lock);
    if (!halted_.empty()) break;
    auto fresh = std::exchange(fresh_, {});
    pending_.insert(pending_.end(), fresh.begin(), fresh.end());
    calling_ = true;
    lock.unlock();
    std::vector<std::shared_ptr<Call>> ended, left;
    std::string failure;
    try {
      for (const auto& call : fresh) call->pending = call->begin(calls_);
      for (const auto& call : pending_) {
        const bool has_ended = !call->pending || calls_.test(*call->pending);
        (has_ended ? ended : left).push_back(call);
      }
      if (has_mpi_ && pending_.empty()) calls_.progress();
    } catch (const std::exception& error) {
      failure = first_line(error);
    }
    lock.lock();
    calling_ = false;
    for (const auto& call : ended) call->ended = true;
    if (failure.empty()) pending_.swap(left);
    quiet_rounds_ = ended.empty() && fresh.empty() ? quiet_rounds_ + 1 : 0;
    if (halted_.empty()) halted_ = failure;
    if (!ended.empty() || !halted_.empty()) changed_.notify_all();
    if (ended.empty()) continue;
    lock.unlock();  // the destructors of calls may start other calls
    ended.clear(), left.clear(), fresh.clear();
    lock.lock();
  }
}

void MpiThread::finish() {
  const auto call = start([this](MpiCalls& calls) {
    if (!calls.is_finished()) calls.finish();
    halt("MPI has ended");
    return MpiPending();
  });
  try {
    while (!wait(*call, kOperationLimit)) {}  // mpirun ends this wait if a rank dies
  } catch (const std::exception&) {  // a group has failed, so other ranks may not come to MPI_Finalize
  }
}

}  // namespace tessera
