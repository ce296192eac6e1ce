#include "tessera/checkpoint/async_saver.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

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

namespace tessera::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kBetweenLooks{2};

}  // namespace

/// What was copied for the last save, whose memory the next one uses again.
struct AsyncSaver::Buffers {
  std::map<std::pair<int, std::string>, at::Tensor> tensors = {};  // by rank and name

  /// The values are those of now. Of a device they are there after the event: it copies them in the order of its queue, so what is queued
  /// later may change what they were copied from.
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

/// A save whose folder is made, and the thread that does the rest.
class AsyncSaver::UnderWay {
 public:
  enum class State { Failed, Writing, Waiting, Done };  // Waiting: rank 0 for the files of others

  UnderWay(const std::filesystem::path& folder, const Contents& contents, const Communicator& world, const SaveOptions& options,
           Buffers& buffers)
      : save_(folder, contents, world, options) {
    std::vector<RankContents> ranks;
    Event copied;
    step_.attempt([&] {
      ranks = contents_of_ranks(save_.number(), contents, world);
      copied = buffers.copy(ranks);
    });
    if (step_.failed()) {
      state_ = State::Failed;
      return;
    }
    AllOrNone start;
    start.attempt([&] {
      thread_ = std::jthread([this, ranks = std::move(ranks), copied, is_first = world.is_first()](const std::stop_token& stop) {
        step_.attempt([&] {
          copied.synchronize();
          save_.write(ranks);
          if (is_first) commit_when_all_have_written(stop);
        });
        state_ = step_.failed() ? State::Failed : State::Done;
      });
    });
    if (!start.failed()) return;
    step_ = start;
    state_ = State::Failed;
  }

  State state() const { return state_; }
  /// All ranks have written, so that rank 0 must see their files before long.
  void expect_files_within(std::chrono::milliseconds limit) {
    if (last_look_.load() == Clock::time_point::max()) last_look_ = Clock::now() + limit;
  }

  /// No longer waits for other ranks, which may still write.
  void abandon() {
    end_thread();
    save_.abandon();
  }

  /// Throws on all ranks if any of them has failed. Collective.
  void finish(const Communicator& world) {
    end_thread();
    step_.expect_all(world, {.unit = "checkpoint"}, save_.failure());
  }

 private:
  void commit_when_all_have_written(const std::stop_token& stop) {
    state_ = State::Waiting;
    while (const auto missing = save_.missing_file()) {
      if (stop.stop_requested()) return;
      if (Clock::now() > last_look_.load()) {
        throw IoError(
            fmt::format("all ranks have written, but rank 0 does not see {}; save where all ranks see the same files", missing->string()));
      }
      std::this_thread::sleep_for(kBetweenLooks);
    }
    save_.commit();
  }

  void end_thread() {
    thread_.request_stop();
    if (thread_.joinable()) thread_.join();
  }

  Save save_;
  AllOrNone step_;  // the thread's, until it has ended
  std::atomic<State> state_ = State::Writing;
  std::atomic<Clock::time_point> last_look_ = Clock::time_point::max();
  std::jthread thread_;  // last: it uses the members above
};

AsyncSaver::AsyncSaver(Communicator world)
    : world_(std::move(world)), exceptions_(std::uncaught_exceptions()), buffers_(std::make_unique<Buffers>()) {}

AsyncSaver::~AsyncSaver() {
  if (!under_way_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    under_way_->abandon();
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
  wait();
  const c10::AutoGradMode no_grad(false);
  under_way_ = std::make_unique<UnderWay>(folder, contents, world_, options, *buffers_);
}

bool AsyncSaver::poll() {
  if (!under_way_) return true;
  using State = UnderWay::State;
  const auto state = under_way_->state();
  try {
    const auto least = static_cast<State>(world_.extremes(static_cast<uint64_t>(state), {.unit = "checkpoint"}).least);
    if (least == State::Writing || least == State::Waiting) {
      if (least == State::Waiting) under_way_->expect_files_within(world_.limit());
      return false;
    }
    under_way_->finish(world_);
  } catch (const CommError&) {
    under_way_->abandon();
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
  const Calling calling("AsyncSaver::wait");
  while (!poll()) std::this_thread::sleep_for(kBetweenLooks);
}

}  // namespace tessera::checkpoint
