#include "tessera/comm/shm/shm_link.h"

#include <fmt/format.h>

#include <cstring>
#include <optional>

#include "tessera/base/error.h"
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

ShmAttempt shm_link(const StorePtr& store, const Identity& identity, Clock::time_point end) {
  // Every rank says what became of its part, so that all take the same way.
  std::optional<SharedBlock> block;
  std::string trouble;
  std::string ticket;
  if (identity.rank == 0) {
    try {
      block = SharedBlock::make(SharedBlock::Source::Memfd, SharedMemoryLink::block_size(identity.world_size));
      ticket = pack(block->ticket());
    } catch (const IoError& error) {
      trouble = error.what();
    }
  }
  const auto tickets = exchange(store, identity, "shm/ticket", ticket, end);
  if (identity.rank != 0 && !tickets.front().empty()) {
    try {
      block = SharedBlock::open(unpack(tickets.front()));
    } catch (const IoError& error) {
      trouble = error.what();
    }
  }
  const auto troubles = exchange(store, identity, "shm/opened", trouble, end);
  for (size_t rank = 0; rank < troubles.size(); rank++) {
    if (!troubles[rank].empty()) return {.link = nullptr, .why_not = fmt::format("rank {} {}", rank, troubles[rank])};
  }
  block->seal();
  return {.link = std::make_unique<SharedMemoryLink>(std::move(*block), identity.rank, identity.world_size), .why_not = {}};
}

}  // namespace tessera
