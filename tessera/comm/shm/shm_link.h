// Shared memory among processes of one host: handed round by way of the store.
#pragma once

#include <memory>
#include <string>

#include "tessera/comm/host/link.h"
#include "tessera/comm/host/rendezvous.h"

namespace tessera {

/// A link on every rank, or on none, with the reason.
struct ShmAttempt {
  std::unique_ptr<Link> link;
  std::string why_not;
};

ShmAttempt shm_link(const StorePtr& store, const Identity& identity, Clock::time_point end);

}  // namespace tessera
