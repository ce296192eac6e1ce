// MpiMeeting: lets the ranks of a program's own communicator meet.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/comm/host/rendezvous.h"
#include "tessera/comm/mpi/mpi_calls.h"

namespace tessera {

/// The ranks of a communicator, which have met through it and now have a store. While it exists, connect_mpi() takes this communicator.
class MpiMeeting {
 public:
  /// Collective over the communicator, in the calling thread. `library` is how its MPI calls itself, `host_name` the name of this rank's
  /// host, `transport` what the program has named or nothing. Throws TimeoutError if not all ranks of the communicator come within the
  /// limit.
  MpiMeeting(std::string_view library, MpiHandle communicator, const std::string& host_name, std::string transport,
             std::chrono::milliseconds limit);
  MpiMeeting(const MpiMeeting&) = delete;
  MpiMeeting& operator=(const MpiMeeting&) = delete;
  ~MpiMeeting();

  const Identity& identity() const { return identity_; }
  const StorePtr& store() const { return store_; }
  /// Where rank 0 serves the store.
  const std::string& host() const { return host_; }
  /// The named transport, or else the one for these ranks.
  const std::string& transport() const { return transport_; }

 private:
  Identity identity_;
  StorePtr store_;
  std::string host_;
  std::string transport_;
};

/// The communicator of the MpiMeeting in this thread.
const std::optional<MpiHandle>& given_mpi();

}  // namespace tessera
