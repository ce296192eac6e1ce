// PeerMonitor: puts together what the flight recorders of all ranks say, when ranks wait in vain, disagree, or get SIGUSR2.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/base/launcher.h"
#include "tessera/comm/control/flight_recorder.h"
#include "tessera/comm/host/rendezvous.h"

namespace tessera {

/// A thread that answers other ranks, so that one gets an answer from a rank that computes, or that hangs somewhere else. It looks into the
/// store once a second.
class PeerMonitor {
 public:
  PeerMonitor(const StorePtr& store, const Identity& identity, std::shared_ptr<const FlightRecorder> recorder);
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;
  ~PeerMonitor();

  /// What the recorders of all ranks say, as far as they answer within some seconds. They are asked once for an incident.
  std::map<int, std::string> ask(std::string_view incident) const;
  /// Logs one text about all ranks; of the ranks that call it for the same incident, only one does. Returns when it is logged, but after
  /// some seconds even if the store does not answer.
  void report(std::string_view incident, std::string_view reason) const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
