// PeerMonitor: combines the records of all ranks in a report when ranks wait in vain, disagree, or get SIGUSR2.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/base/launcher.h"
#include "tessera/comm/host/rendezvous.h"
#include "tessera/comm/record.h"

namespace tessera {

/// Answers other ranks in a thread of its own, even while this rank computes or hangs. The thread looks into the store once a second. After
/// SIGUSR2 to any rank, and at any incident of a run that is recorded, each rank writes its trace.
class PeerMonitor {
 public:
  PeerMonitor(const StorePtr& store, const Identity& identity, std::shared_ptr<const Record> record);
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;
  ~PeerMonitor();

  /// Returns the records of all ranks that answer within some seconds. Asks them only once for each incident.
  std::map<int, std::string> ask(std::string_view incident) const;
  /// Logs one text about all ranks. If several ranks call it for the same incident, only one of them logs. Returns when the text is logged,
  /// or after some seconds if the store does not answer.
  void report(std::string_view incident, std::string_view reason) const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
