#include "tessera/comm/shm/shared_memory_link.h"

#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/stream.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/host/bytes.h"
#include "tessera/comm/host/shared_area.h"

namespace tessera {
namespace {

constexpr size_t kSlot = size_t{1} << 20;
// Larger transfers bypass the caches: reading a slot from the cache of another core is slow if the two share no cache, and large results
// would evict everything else.
constexpr size_t kLarge = size_t{1} << 22;

using Copy = void (*)(std::byte* target, const std::byte* source, size_t bytes);

Copy copy_of(size_t all) {
  if (all >= kLarge) return detail::stream;
  return [](std::byte* target, const std::byte* source, size_t bytes) {
    if (bytes > 0) std::memcpy(target, source, bytes);
  };
}

}  // namespace

size_t SharedMemoryLink::block_size(int ranks) {
  return PeerGroup::header_bytes(ranks) + ranks * (sizeof(Counter) + 2 * kSlot);
}

SharedMemoryLink::SharedMemoryLink(SharedBlock block, int rank, std::vector<int> world_ranks)
    : peers_(std::make_shared<PeerGroup>(std::move(block), rank, std::move(world_ranks))) {}

std::span<Counter> SharedMemoryLink::turns() const {
  return {reinterpret_cast<Counter*>(peers_->payload()), static_cast<size_t>(size())};
}

std::byte* SharedMemoryLink::slot(int rank) const {
  auto* slots = peers_->payload() + turns().size_bytes();
  return slots + (rank * 2 + turn_ % 2) * kSlot;
}

/// Each rank writes its digest, and then reads those of all ranks. This takes one turn; messages between ranks would take several.
void SharedMemoryLink::combine(Digest& digest, Clock::time_point deadline) {
  peers_->expect_running();
  turn_++;
  std::memcpy(slot(rank()), &digest, sizeof digest);
  next_turn(deadline);
  for (int r = 0; r < size(); r++) digest.add(*reinterpret_cast<const Digest*>(slot(r)));
}

void SharedMemoryLink::all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) {
  peers_->expect_running();
  const size_t longest = std::ranges::max(from, {}, &Bytes::size).size();
  const auto copy = copy_of(longest * from.size());
  const bool in_place = own.data() == from[rank()].data();
  for (size_t begin = 0; begin < longest; begin += kSlot) {
    turn_++;
    const auto part = byte_range(own, begin, kSlot);
    copy(slot(rank()), part.data(), part.size());
    if (!in_place) copy(byte_range(from[rank()], begin, kSlot).data(), part.data(), part.size());  // while the part is in the cache
    next_turn(deadline);
    for (int r = 0; r < size(); r++) {
      const auto target = byte_range(from[r], begin, kSlot);
      if (r != rank()) copy(target.data(), slot(r), target.size());
    }
  }
}

void SharedMemoryLink::exchange(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) {
  peers_->expect_running();
  const auto self = static_cast<size_t>(rank());
  // A slot has the size of its rank's longest message, by which after the first turn all ranks know how many turns there are, and a part
  // for each rank.
  constexpr size_t kHead = 64;
  const size_t part_size = (kSlot - kHead) / to.size() / 64 * 64;
  size_t own_longest = 0;
  for (size_t r = 0; r < to.size(); r++) {
    if (r != self) own_longest = std::max(own_longest, to[r].size());
  }
  const auto copy = copy_of(own_longest * to.size());
  for (size_t begin = 0, longest = 1; begin < longest; begin += part_size) {
    turn_++;
    std::memcpy(slot(rank()), &own_longest, sizeof own_longest);
    for (size_t r = 0; r < to.size(); r++) {
      const auto part = byte_range(to[r], begin, part_size);
      if (r != self) copy(slot(rank()) + kHead + r * part_size, part.data(), part.size());
    }
    next_turn(deadline);
    for (size_t r = 0; r < from.size(); r++) {
      const auto* const theirs = slot(static_cast<int>(r));
      longest = std::max(longest, *reinterpret_cast<const size_t*>(theirs));
      const auto part = byte_range(from[r], begin, part_size);
      if (r != self) copy(part.data(), theirs + kHead + self * part_size, part.size());
    }
  }
}

void SharedMemoryLink::all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) {
  peers_->expect_running();
  const auto self = static_cast<size_t>(rank());
  // A slot has a part for each rank. Every rank sends to rank r as many bytes as rank r sends to itself.
  const size_t part_size = kSlot / to.size() / 64 * 64;
  const size_t longest = std::ranges::max(to, {}, &ConstBytes::size).size();
  const auto copy = copy_of(longest * to.size());
  c10::SmallVector<ConstBytes, 8> rows(to.size());
  for (size_t begin = 0; begin < longest; begin += part_size) {
    turn_++;
    for (size_t r = 0; r < to.size(); r++) {
      const auto part = byte_range(to[r], begin, part_size);
      if (r != self) copy(slot(rank()) + r * part_size, part.data(), part.size());
    }
    next_turn(deadline);
    const auto own = byte_range(to[self], begin, part_size);
    for (size_t r = 0; r < to.size(); r++) {
      rows[r] = r == self ? own : ConstBytes(slot(static_cast<int>(r)) + self * part_size, own.size());
    }
    visit(begin, rows);
  }
}

void SharedMemoryLink::next_turn(Clock::time_point deadline) {
  peers_->raise(turns()[rank()], turn_);
  // This wait continues in a deadlock, because half an exchange can't be undone; ranks that wait elsewhere get the error.
  peers_->wait(turns(), turn_, deadline, {.deadlock = Deadlock::WaitOn, .what = what_, .is_program = does_wait_});
}

SharedBlock SharedMemoryLink::open_from(int leader, const SharedBlock* own, Clock::time_point deadline) {
  const auto ticket = own != nullptr ? own->ticket() : SharedBlock::Ticket();
  const auto tickets = all_gather_values(*this, ticket, deadline);
  if (leader != rank()) return SharedBlock::open(tickets[leader]);
  if (own == nullptr) throw IoError("there is nothing to share");
  return *own;
}

std::unique_ptr<Link> SharedMemoryLink::split(std::span<const int> members, Clock::time_point deadline) {
  const bool leads = members.front() == rank();
  if (leads) made_ = SharedBlock::make(peers_->block().ticket().source, block_size(static_cast<int>(members.size())));
  auto block = open_from(members.front(), leads ? &*made_ : nullptr, deadline);
  turn_++;
  next_turn(deadline);
  block.seal();
  if (made_) made_->seal();
  const auto position = static_cast<int>(std::ranges::find(members, rank()) - members.begin());
  return std::make_unique<SharedMemoryLink>(std::move(block), position, part_of_world(members));
}

SharedAttempt SharedMemoryLink::share(const AreaShape& shape, Clock::time_point deadline) {
  AllOrNone step;
  std::optional<SharedBlock> block;
  const auto source = peers_->block().ticket().source;
  if (rank() == 0) {
    step.attempt([&] { block = SharedBlock::make(source, SharedArea::block_size(shape, size()), SharedBlock::Commit::Later); });
  }
  made_ = block;
  step.attempt([&] { block = open_from(0, made_ ? &*made_ : nullptr, deadline); });
  if (!step.failed()) step.attempt([&] { SharedArea::commit(*block, shape, rank(), size()); });

  if (const auto found = AllOrNone::first(all_gather_texts(*this, step.trouble(), deadline))) {
    return {.why_not = fmt::format("rank {}: {}", world_ranks()[found->rank], found->words)};
  }
  block->seal();
  if (made_) made_->seal();
  return {.area = std::make_shared<SharedArea>(*block, shape, peers_), .why_not = {}};
}

}  // namespace tessera
