// A link through shared memory among processes of one host, which find the memory through the store.
#pragma once

#include <memory>
#include <string>

#include "tessera/comm/host/link.h"
#include "tessera/comm/host/rendezvous.h"

namespace tessera {

/// A link on every rank; or on none, and then `link` is null and `why_not` has the reason.
struct ShmAttempt {
  std::unique_ptr<Link> link;
  std::string why_not;
};

/// Collective. Throws TimeoutError if ranks are missing at `end`.
ShmAttempt shm_link(const StorePtr& store, const Identity& identity, Clock::time_point end);

}  // namespace tessera
