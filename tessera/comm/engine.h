// An engine, as the table of engines describes it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/comm/communicator.h"
#include "tessera/comm/host/link.h"
#include "tessera/comm/host/rendezvous.h"
#include "tessera/comm/transport.h"

namespace tessera {

class LinkFamily;

/// What the ranks know of each other before they are connected.
struct Meeting {
  StorePtr store;  // of this world alone
  Identity identity;
  Topology topology;
  c10::Device device = c10::kCPU;  // of this rank's tensors
  std::chrono::milliseconds start_limit;
  Clock::time_point end;  // of the start
};

/// The same on every rank: a link, or none and the reason in `why_not`.
struct Connection {
  std::shared_ptr<Link> link = nullptr;
  std::string why_not = {};
  std::unique_ptr<Transport> transport = nullptr;  // unset: a HostTransport over the link
};

/// The `why_not` of engines that can always be had.
inline std::string no_reason() {
  return {};
}

struct Engine {
  enum class Reach { OneRank, OneHost, Hosts };
  using Program = std::function<void(Communicator world)>;

  std::string_view name;
  std::string_view ranks;  // how they run, for people
  Reach reach = Reach::Hosts;
  /// Whose memory it moves. Engines for host memory serve devices, too, through host memory.
  c10::DeviceType device = c10::kCPU;
  bool automatic = false;  // whether `auto` chooses it, if it is the first that can be had
  /// Why it can't be had in this process; empty if it can.
  std::string (*why_not)() = no_reason;
  /// Collective: connects processes that have met. Unset: its ranks are not processes.
  Connection (*connect)(const Meeting& meeting) = nullptr;
  /// Makes the world of a process that is all ranks by itself. Unset: a process is one rank.
  Communicator (*alone)() = nullptr;
  /// Runs ranks in this process. Unset: each rank is a process.
  void (*run)(int ranks, const Program& program, std::chrono::milliseconds limit) = nullptr;
};

/// A world over a connection. `family` records what its groups do. Where its transport moves host memory and the device of `traits` is
/// another, tensors go through host memory.
Communicator world_over(Connection connection, GroupTraits traits, std::shared_ptr<LinkFamily> family = nullptr);

}  // namespace tessera
