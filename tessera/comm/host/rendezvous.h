// Who this process is, and the store in which ranks meet before they are connected.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/comm/host/link.h"

namespace tessera {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct Identity {
  int rank = 0;
  int world_size = 1;
};
/// The identity that the environment gives this process, or nothing if it gives none. Throws ConfigError if only a part of it is set.
std::optional<Identity> identity_from_environment();

/// The store that TESSERA_STORE names, or else one that rank 0 serves at MASTER_ADDR:MASTER_PORT. It exists until the process ends, because
/// other ranks may still be joining, or look there for the reason why the group failed.
StorePtr store_from_environment(const Identity& identity, Clock::time_point end);

/// How many worlds this process has joined as this rank through this store; each world has keys of its own. The process counts, and not the
/// store: a second process of the same rank, or a file of an earlier run, would change a count in the store and so stay unnoticed.
int next_round(const StorePtr& store, int rank);

/// A text that is the same for ranks of one host, and different for others. TESSERA_HOST_ID overrides it.
std::string host_id();

/// Collective: what each rank passes as `own`, in rank order, through the store. Throws TimeoutError that names the missing ranks.
std::vector<std::string> exchange(const StorePtr& store, const Identity& identity, const std::string& topic, const std::string& own,
                                  Clock::time_point end);

/// The number of this rank on its host, if a launcher has set it.
std::optional<int> local_rank_from_environment();

/// The address that this host uses to reach MASTER_ADDR; empty if it can't be determined.
std::string address_towards_master();

}  // namespace tessera
