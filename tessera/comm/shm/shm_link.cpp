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
  const auto& topology = meeting.topology;
  const auto here = topology.ranks_on(topology.host_of(identity.rank));
  const auto size = static_cast<int>(here.size()), leader = here.front();
  const StartWait wait{.end = meeting.end};
  AllOrNone step;
  std::optional<SharedBlock> block;
  std::string ticket;
  if (identity.rank == leader) {
    step.attempt([&] {
      block = SharedBlock::make(SharedBlock::Source::Memfd, SharedMemoryLink::block_size(size));
      ticket = pack(block->ticket());
    });
  }
  const auto tickets = exchange(meeting.store, identity, "shm/ticket", ticket, wait);
  const auto& found = tickets[static_cast<size_t>(leader)];
  if (identity.rank != leader && !found.empty()) step.attempt([&] { block = SharedBlock::open(unpack(found)); });
  const auto troubles = exchange(meeting.store, identity, "shm/opened", step.trouble(), wait);
  if (const auto first = AllOrNone::first(troubles)) {
    return {.why_not = fmt::format("rank {}: {}", first->rank, first->words)};
  }
  block->seal();
  std::vector<int> ranks(here.begin(), here.end());
  return {.link = std::make_unique<SharedMemoryLink>(std::move(*block), topology.place_of(identity.rank), std::move(ranks))};
}

}  // namespace tessera
