// The store in which ranks meet before they are connected.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/base/launcher.h"
#include "tessera/comm/host/link.h"

namespace tessera {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// How long a rank waits for the other ranks at the start.
struct StartWait {
  Clock::time_point end;                                // when an error names the missing ranks
  Clock::time_point notice = Clock::time_point::max();  // when a warning names the missing ranks
  std::string place = {};                               // where the ranks meet, for warnings
};

/// The store that TESSERA_STORE names, or else the store that torchrun or rank 0 serves at the meeting point. It exists until the process
/// ends, because other ranks may still be joining, or look there for the reason why the group failed.
StorePtr store_from_environment(const Identity& identity, const StartWait& wait);

/// Where the store of store_from_environment() is: "at 127.0.0.1:29500, where rank 0 listens (MASTER_ADDR, MASTER_PORT)".
std::string meeting_place();

/// A store at `point`: rank 0 serves it until its process ends, the other ranks are its clients. Only processes that know the secret of
/// given_secret() can join; rank 0 warns if there is none and other hosts can reach the store. Throws TimeoutError with the reason of the
/// last attempt.
StorePtr serve_or_join(const Identity& identity, const MeetingPoint& point, const StartWait& wait);

/// Counts the worlds that this process joins as this rank through this store, and returns how many it had joined before, so that each world
/// has keys of its own in the store. The count is kept in this process and not in the store: so a second process of the same rank, or a run
/// with the file of an earlier run, uses keys that exist already, and exchange() refuses it.
int next_round(const StorePtr& store, int rank);

/// A text that is the same for ranks of one host, and different for ranks of other hosts. TESSERA_HOST_ID overrides it.
std::string host_id();

/// Collective: returns the `own` of each rank, in rank order, exchanged through the store. Throws a TimeoutError that names the missing
/// ranks.
std::vector<std::string> exchange(const StorePtr& store, const Identity& identity, const std::string& topic, const std::string& own,
                                  const StartWait& wait);

/// The address that this host uses to reach another one; empty if it can't be determined.
std::string address_towards(const std::string& host, Clock::time_point end);

}  // namespace tessera
