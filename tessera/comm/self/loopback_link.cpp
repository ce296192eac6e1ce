#include "tessera/comm/self/loopback_link.h"

#include <algorithm>

#include "tessera/comm/host/peer_group.h"
#include "tessera/comm/host/shared_area.h"
#include "tessera/comm/simulation.h"

namespace tessera {
namespace {

/// In a dry run, large tensors have no values, and only messages such as texts are copied.
bool copies(size_t bytes) {
  constexpr size_t kLargestMessage = size_t{64} << 10;
  return Simulation::current() == nullptr || bytes <= kLargestMessage;
}

}  // namespace

void LoopbackLink::combine(Digest& /*digest*/, Clock::time_point /*deadline*/) {
  expect_running();
}

void LoopbackLink::all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point /*deadline*/) {
  expect_running();
  if (!copies(own.size())) return;
  for (const auto& target : from) copy_own(own.first(std::min(own.size(), target.size())), target);
}

void LoopbackLink::exchange(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point /*deadline*/) {
  expect_running();
  if (!copies(to.front().size())) return;
  for (size_t r = 0; r < to.size(); r++) copy_own(to[r].first(std::min(to[r].size(), from[r].size())), from[r]);
}

void LoopbackLink::all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point /*deadline*/) {
  expect_running();
  if (copies(to.front().size())) visit(0, std::vector(to.size(), to[rank_]));
}

std::unique_ptr<Link> LoopbackLink::split(std::span<const int> members, Clock::time_point /*deadline*/) {
  expect_running();
  const auto position = std::ranges::find(members, rank_) - members.begin();
  return std::make_unique<LoopbackLink>(static_cast<int>(position), part_of_world(members));
}

SharedAttempt LoopbackLink::share(const AreaShape& shape, Clock::time_point deadline) {
  if (size() > 1) return Link::share(shape, deadline);
  return share_with_nobody(shape, 1);
}

SharedAttempt LoopbackLink::share_with_nobody(const AreaShape& shape, size_t sharers) {
  // In a dry run, a file in memory, of which no page is there before it is written.
  auto* const simulation = Simulation::current();
  const auto source = simulation != nullptr ? SharedBlock::Source::Memfd : SharedBlock::Source::Heap;
  const auto make = [&](size_t bytes) { return SharedBlock::make(source, bytes, SharedBlock::Commit::Later); };
  // Memory with counters is written piece by piece, and whoever writes it notes how far.
  if (simulation != nullptr && shape.counters == 0) simulation->note_memory(shape.bytes_per_rank * world_ranks_.size() / sharers);
  const auto peers = std::make_shared<PeerGroup>(make(PeerGroup::header_bytes(size())), rank_, world_ranks_);
  return {.area = std::make_shared<SharedArea>(make(SharedArea::block_size(shape, size())), shape, peers), .why_not = {}};
}

void LoopbackLink::abort(std::string_view reason, int culprit) noexcept {
  std::lock_guard lock(mutex_);
  if (!aborted_) aborted_ = LinkFailure{.kind = LinkFailure::Kind::Aborted, .reason = std::string(reason), .culprit = culprit};
}

void LoopbackLink::expect_running() {
  std::lock_guard lock(mutex_);
  if (aborted_) throw LinkFailure(*aborted_);
}

}  // namespace tessera
