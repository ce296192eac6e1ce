#include "tessera/comm/host/shared_area.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/host/peer_group.h"
#include "tessera/comm/simulation.h"

namespace tessera {
namespace {

/// The size of the data, rounded up so that the counters after it lie on pages of their own.
size_t data_size(const AreaShape& shape, int ranks) {
  constexpr size_t kPage = 4096;
  return (shape.bytes_per_rank * ranks + kPage - 1) / kPage * kPage;
}

}  // namespace

size_t SharedArea::block_size(const AreaShape& shape, int ranks) {
  return data_size(shape, ranks) + shape.counters * ranks * sizeof(Counter);
}

void SharedArea::commit(const SharedBlock& block, const AreaShape& shape, int rank, int ranks) {
  block.commit(rank * shape.bytes_per_rank, shape.bytes_per_rank);
  if (rank == 0) block.commit(data_size(shape, ranks), block.size() - data_size(shape, ranks));
}

SharedArea::SharedArea(const SharedBlock& block, const AreaShape& shape, std::shared_ptr<PeerGroup> peers)
    : data_(block.memory()), shape_(shape), peers_(std::move(peers)) {}

int SharedArea::rank() const {
  return peers_->rank();
}

int SharedArea::size() const {
  return peers_->size();
}

void SharedArea::reach(int counter, uint32_t value) const {
  peers_->used_by_this_thread();
  if (Simulation::current() != nullptr) {  // the other ranks do whatever this one does
    for (auto& each : counters(counter)) peers_->raise(each, value);
    return;
  }
  peers_->raise(counters(counter)[rank()], value);
}

std::span<Counter> SharedArea::counters(int which) const {
  auto* const first = reinterpret_cast<Counter*>(data_.get() + data_size(shape_, size()));
  return std::span(first + which * size(), static_cast<size_t>(size()));
}

bool SharedArea::reached_by_all(int counter, uint32_t value) const {
  return std::ranges::all_of(counters(counter), [&](const Counter& one) { return PeerGroup::has_come(one, value); });
}

void SharedArea::expect_in_step() const {
  if (peers_->in_step()) return;
  throw CommError(
      "the ranks are out of step since an error in which they waited for each other; call tessera::recover(model) on every rank before "
      "the next batch, or end the program");
}

Callers SharedArea::callers() const {
  return peers_->callers();
}

void SharedArea::back_in_step() const {
  peers_->back_in_step();
}

void SharedArea::wait(int counter, uint32_t value, std::chrono::milliseconds limit, c10::function_ref<std::string()> what) const {
  wait_as(Deadlock::Throw, counter, value, limit, what);
}

bool SharedArea::wait_or_yield(int counter, uint32_t value, std::chrono::milliseconds limit, c10::function_ref<std::string()> what) const {
  return wait_as(Deadlock::Yield, counter, value, limit, what);
}

bool SharedArea::wait_as(Deadlock deadlock, int counter, uint32_t value, std::chrono::milliseconds limit,
                         c10::function_ref<std::string()> what) const {
  peers_->used_by_this_thread();
  try {
    return peers_->wait(counters(counter), value, Clock::now() + limit, {.deadlock = deadlock, .what = what});
  } catch (const LinkFailure& failure) {
    if (failure.kind == LinkFailure::Kind::Deadlocked) {
      peers_->fall_out_of_step();
      throw DeadlockError(
          "the ranks wait for each other: {}. Every rank must take the same steps with the same units: as many backward passes, "
          "the same optimizers, and the same writes, also to shards that are empty there; a rank that leaves out a step must call "
          "tessera::skip_step",
          peers_->waits_of_all());
    }
    std::string rest;
    for (size_t r = 0; r < peers_->world_ranks().size(); r++) {
      const int rank = peers_->world_ranks()[r];
      if (std::ranges::find(failure.ranks, rank) == failure.ranks.end()) continue;
      rest += fmt::format("; rank {} is {} behind", rank, value - counters(counter)[r].value.load());
    }
    if (failure.kind == LinkFailure::Kind::Gone && !failure.reason.ends_with("has died")) rest += kSameBatches;
    const auto error = error_of(failure, what(), limit, rest);
    if (tell_) tell_(failure, message_of(error));
    std::rethrow_exception(error);
  }
}

}  // namespace tessera
