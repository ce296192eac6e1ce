#include "tessera/comm/self/loopback_link.h"

#include <algorithm>

#include "tessera/comm/host/peer_group.h"
#include "tessera/comm/host/shared_area.h"

namespace tessera {

void LoopbackLink::combine(Digest& /*digest*/, Clock::time_point /*deadline*/) {
  expect_running();
}

void LoopbackLink::all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point /*deadline*/) {
  expect_running();
  for (const auto& target : from) copy_own(own.first(std::min(own.size(), target.size())), target);
}

void LoopbackLink::exchange(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point /*deadline*/) {
  expect_running();
  for (size_t r = 0; r < to.size(); r++) copy_own(to[r].first(std::min(to[r].size(), from[r].size())), from[r]);
}

void LoopbackLink::all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point /*deadline*/) {
  expect_running();
  visit(0, std::vector(to.size(), to[rank_]));
}

std::unique_ptr<Link> LoopbackLink::split(std::span<const int> members, Clock::time_point /*deadline*/) {
  expect_running();
  const auto position = std::ranges::find(members, rank_) - members.begin();
  return std::make_unique<LoopbackLink>(static_cast<int>(position), part_of_world(members));
}

SharedAttempt LoopbackLink::share(const AreaShape& shape, Clock::time_point deadline) {
  if (size() > 1) return Link::share(shape, deadline);
  const auto peers = std::make_shared<PeerGroup>(SharedBlock::make(SharedBlock::Source::Heap, PeerGroup::header_bytes(1)), 0, world_ranks_);
  return {
      .area = std::make_shared<SharedArea>(SharedBlock::make(SharedBlock::Source::Heap, SharedArea::block_size(shape, 1)), shape, peers),
      .why_not = {}};
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
