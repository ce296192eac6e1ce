#include "tessera/checkpoint/async_saver.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <optional>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/pinned_memory.h"
#include "tessera/checkpoint/live/save.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/simulation.h"

namespace tessera::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kBetweenLooks{2};

}  // namespace

/// Buffers into which a save copies its values. The next save reuses them.
struct AsyncSaver::Buffers {
  std::map<std::pair<int, std::string>, at::Tensor> tensors = {};  // by rank and name

  /// Copies the values as they are at this moment. Copies from a device run in stream order and are complete after the returned event, so
  /// work that is queued later may change the originals.
  Event copy(std::vector<RankContents>& ranks) {
    std::map<std::pair<int, std::string>, at::Tensor> used;
    std::optional<c10::Device> device;
    for (auto& rank : ranks) {
      for (auto& [name, tensor] : rank.tensors) {
        const std::pair key(rank.record.rank, name);
        const bool pins = has_pinned_memory(tensor.device());
        auto buffer = std::move(tensors[key]);
        if (!buffer.defined() || buffer.scalar_type() != tensor.scalar_type() || buffer.sizes() != tensor.sizes()) {
          buffer = pins ? empty_pinned(tensor.sizes(), tensor.scalar_type(), tensor.device())
                        : at::empty(tensor.sizes(), at::TensorOptions(at::kCPU).dtype(tensor.scalar_type()));
        }
        buffer.copy_(tensor, /*non_blocking=*/pins);
        if (pins) device = tensor.device();
        tensor = used[key] = buffer;
      }
    }
    tensors = std::move(used);
    return device ? Event::record(*device) : Event();
  }
};

enum class AsyncSaver::State { Stuck, Failed, Writing, Waiting, Done };  // Waiting: rank 0 waits for the other ranks' files

/// A save whose folder exists already, and the thread that writes and commits it.
class AsyncSaver::UnderWay {
 public:
  UnderWay(const std::filesystem::path& folder, const Contents& contents, const Communicator& world, const SaveOptions& options,
           Buffers& buffers)
      : work_(std::make_shared<Work>(folder, contents, world, options)), buffers_(buffers) {
    std::vector<RankContents> ranks;
    Event copied;
    work_->step.attempt([&] {
      ranks = contents_of_ranks(work_->save.number(), contents, world);
      copied = buffers.copy(ranks);
    });
    if (work_->step.failed()) {
      work_->state = State::Failed;
      return;
    }
    AllOrNone start;
    start.attempt([&] {
      thread_ = std::jthread([work = work_, ranks = std::move(ranks), copied, is_first = world.is_first()](const std::stop_token& stop) {
        work->run(ranks, copied, is_first, stop);
      });
    });
    if (!start.failed()) return;
    work_->step = start;
    work_->state = State::Failed;
  }

  State state() const { return work_->state; }
  /// Returns Stuck if the thread has made no progress for `limit` during a wait.
  State state_within(std::chrono::milliseconds limit) {
    const auto state = this->state();
    if (has_ended(state)) return state;
    const auto moves = work_->moves.load();
    if (moves != seen_ || !waiting_since_) {
      seen_ = moves;
      waiting_since_ = Clock::now();
    }
    is_stuck_ = Clock::now() - *waiting_since_ > limit;
    return is_stuck_ ? State::Stuck : state;
  }
  void begin_wait() { waiting_since_.reset(); }

  /// Makes the save fail if rank 0 does not see the files of all ranks within `limit`. Called when all ranks have written them.
  void expect_files_within(std::chrono::milliseconds limit) {
    if (work_->last_look.load() == Clock::time_point::max()) work_->last_look = Clock::now() + limit;
  }

  /// Ends this rank's thread without waiting for other ranks, which may still write.
  void abandon(std::chrono::milliseconds limit) {
    end_thread(limit);
    if (!is_stuck_) work_->save.abandon();
  }

  /// Throws on all ranks if any of them has failed or is stuck. Collective.
  void finish(const Communicator& world) {
    end_thread(world.limit());
    AllOrNone step;
    if (is_stuck_) {
      step.attempt([&] {
        throw IoError(
            "nothing was written for {} s, so its disk, store or device does not answer; the files of {} written so far stay "
            "there, and are not a checkpoint",
            std::chrono::duration<double>(world.limit()).count(), work_->save.folder());
      });
    } else {
      step = work_->step;
    }
    step.expect_all(world, {.unit = "checkpoint"}, work_->save.commit_failure());
  }

 private:
  /// All that the thread uses. Outlives the saver if the thread is stuck.
  struct Work {
    Work(const std::filesystem::path& folder, const Contents& contents, const Communicator& world, const SaveOptions& options)
        : save(folder, contents, world, options) {}

    void run(const std::vector<RankContents>& ranks, const Event& copied, bool is_first, const std::stop_token& stop) {
      step.attempt([&] {
        copied.synchronize();
        save.write(ranks, [&] { moves++; });
        if (is_first) commit_when_all_have_written(stop);
      });
      if (left_alone) save.abandon();
      state = step.failed() ? State::Failed : State::Done;
    }

    void commit_when_all_have_written(const std::stop_token& stop) {
      state = State::Waiting;
      while (const auto missing = save.missing_file()) {
        moves++;
        if (stop.stop_requested()) return;
        if (Clock::now() > last_look.load()) {
          throw IoError("all ranks have written, but rank 0 does not see {}; save where all ranks see the same files", missing->string());
        }
        std::this_thread::sleep_for(kBetweenLooks);
      }
      moves++;
      if (!stop.stop_requested()) save.commit();
    }

    Save save;
    AllOrNone step;  // until the thread has ended, only the thread uses it
    std::atomic<State> state = State::Writing;
    std::atomic<uint64_t> moves = 0;  // counts the tensors that the thread has written and its looks for the ranks' files
    std::atomic<bool> left_alone = false;
    std::atomic<Clock::time_point> last_look = Clock::time_point::max();
  };

  static bool has_ended(State state) { return state == State::Done || state == State::Failed; }

  void end_thread(std::chrono::milliseconds limit) {
    thread_.request_stop();
    while (!has_ended(state()) && !is_stuck_) {
      if (state_within(limit) != State::Stuck) std::this_thread::sleep_for(kBetweenLooks);
    }
    if (!thread_.joinable()) return;
    if (is_stuck_) {
      leave_thread();
    } else {
      thread_.join();
    }
  }

  void leave_thread() {
    buffers_.tensors.clear();  // so that no later save reuses them: the thread still reads them
    work_->left_alone = true;
    thread_.request_stop();
    thread_.detach();
  }

  const std::shared_ptr<Work> work_;
  Buffers& buffers_;
  uint64_t seen_ = 0;  // the value of `moves` that state_within() has seen last
  std::optional<Clock::time_point> waiting_since_;
  bool is_stuck_ = false;
  std::jthread thread_;
};

AsyncSaver::AsyncSaver(Communicator world)
    : world_(std::move(world)), exceptions_(std::uncaught_exceptions()), buffers_(std::make_unique<Buffers>()) {}

AsyncSaver::~AsyncSaver() {
  if (!under_way_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    under_way_->abandon(world_.limit());
    return;
  }
  try {
    wait();
  } catch (const std::exception& error) {
    log(LogLevel::Error, error.what());
  }
}

void AsyncSaver::save(const std::filesystem::path& folder, const Contents& contents, const SaveOptions& options) {
  const Calling calling("AsyncSaver::save");
  if (Simulation::current() != nullptr) return;  // a dry run leaves no files
  wait();
  const c10::AutoGradMode no_grad(false);
  under_way_ = std::make_unique<UnderWay>(folder, contents, world_, options, *buffers_);
}

bool AsyncSaver::poll() {
  return !under_way_ || has_ended(under_way_->state());
}

bool AsyncSaver::has_ended(State own) {
  try {
    const auto least = static_cast<State>(world_.extremes(static_cast<uint64_t>(own), {.unit = "checkpoint"}).least);
    if (least == State::Writing || least == State::Waiting) {
      if (least == State::Waiting) under_way_->expect_files_within(world_.limit());
      return false;
    }
    under_way_->finish(world_);
  } catch (const CommError&) {
    under_way_->abandon(world_.limit());
    under_way_.reset();
    throw;
  } catch (...) {
    under_way_.reset();
    throw;
  }
  under_way_.reset();
  return true;
}

void AsyncSaver::wait() {
  if (!under_way_) return;
  const Calling calling("AsyncSaver::wait");
  under_way_->begin_wait();
  while (!has_ended(under_way_->state_within(world_.limit()))) std::this_thread::sleep_for(kBetweenLooks);
}

}  // namespace tessera::checkpoint
