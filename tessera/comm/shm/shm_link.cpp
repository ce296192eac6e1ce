#include "tessera/comm/shm/shm_link.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>
#include <optional>

#include "tessera/base/fd.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/shm/shared_memory_link.h"

namespace tessera {
namespace {

std::string pack(const SharedBlock::Ticket& ticket) {
  return {reinterpret_cast<const char*>(&ticket), sizeof ticket};
}

SharedBlock::Ticket unpack(const std::string& bytes) {
  SharedBlock::Ticket ticket;
  std::memcpy(&ticket, bytes.data(), std::min(bytes.size(), sizeof ticket));
  return ticket;
}

}  // namespace

std::string why_no_shm() {
  const Fd memory(::memfd_create("tessera", MFD_CLOEXEC));
  return memory ? "" : "this system refuses memfd_create";
}

Connection connect_shm(const Meeting& meeting) {
  const auto& identity = meeting.identity;
  const StartWait wait{.end = meeting.end};
  AllOrNone step;
  std::optional<SharedBlock> block;
  std::string ticket;
  if (identity.rank == 0) {
    step.attempt([&] {
      block = SharedBlock::make(SharedBlock::Source::Memfd, SharedMemoryLink::block_size(identity.world_size));
      ticket = pack(block->ticket());
    });
  }
  const auto tickets = exchange(meeting.store, identity, "shm/ticket", ticket, wait);
  if (identity.rank != 0 && !tickets.front().empty()) step.attempt([&] { block = SharedBlock::open(unpack(tickets.front())); });
  const auto troubles = exchange(meeting.store, identity, "shm/opened", step.trouble(), wait);
  if (const auto found = AllOrNone::first(troubles)) {
    return {.why_not = fmt::format("rank {}: {}", found->rank, found->words)};
  }
  block->seal();
  return {.link = std::make_unique<SharedMemoryLink>(std::move(*block), identity.rank, all_ranks(identity.world_size))};
}

}  // namespace tessera
