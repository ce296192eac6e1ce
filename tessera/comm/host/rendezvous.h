// Who this process is, and the store in which ranks meet before they are connected.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/comm/host/link.h"

namespace tessera {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// What the environment says about this process, or nothing for a lone one. Half a description is a ConfigError.
struct Identity {
  int rank = 0;
  int world_size = 1;
};
std::optional<Identity> identity_from_environment();

/// The store that TESSERA_STORE names, else one served by rank 0 at MASTER_ADDR:MASTER_PORT. The same one until the process ends: ranks
/// that are still on their way in, or want to know why the group failed, must find it.
StorePtr store_from_environment(const Identity& identity, Clock::time_point end);

/// The same for ranks of one host, different for others. TESSERA_HOST_ID overrides it.
std::string host_id();

/// What every rank puts into the store under `topic`, in rank order. Waits for all; the error names who has not come.
std::vector<std::string> exchange(const StorePtr& store, const Identity& identity, const std::string& topic, const std::string& own,
                                  Clock::time_point end);

/// What a launcher says about this rank's number on its host.
std::optional<int> local_rank_from_environment();

/// This host's address on the way to MASTER_ADDR; empty if that can't be told.
std::string address_towards_master();

}  // namespace tessera
