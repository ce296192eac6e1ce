// Engine: a way to connect ranks and move their data, as a row of the table of engines.
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

/// All that ranks know of each other before they are connected.
struct Meeting {
  StorePtr store;  // only this world uses it
  Identity identity;
  Topology topology;
  c10::Device device = c10::kCPU;  // the device of this rank's tensors
  std::chrono::milliseconds start_limit;
  Clock::time_point end;  // the time limit of the start
};

/// The result of connecting, the same on every rank: a link, or the reason in `why_not` if there is no link.
struct Connection {
  std::shared_ptr<Link> link = nullptr;
  std::string why_not = {};
  std::unique_ptr<Transport> transport = nullptr;  // unset: a HostTransport over the link
};

/// The `why_not` of engines that are always available.
inline std::string no_reason() {
  return {};
}

struct Engine {
  enum class Reach { OneRank, OneHost, Hosts };
  using Program = std::function<void(Communicator world)>;

  std::string_view name;
  std::string_view ranks;  // how the ranks run, in words for people
  Reach reach = Reach::Hosts;
  /// The kind of device whose memory the engine moves. An engine for the CPU serves other devices, too: their tensors are copied to and
  /// from host memory.
  c10::DeviceType device = c10::kCPU;
  bool two_levels = false;  // whether the link may become the outer one of a LevelsLink, which then moves all data
  bool automatic = false;  // whether `auto`, which takes the first available engine, may take this one
  /// Why the engine is not available in this process; empty if it is.
  std::string (*why_not)() = no_reason;
  /// Collective: connects processes that have met in a store. Unset: the engine's ranks are not processes.
  Connection (*connect)(const Meeting& meeting) = nullptr;
  /// Makes the world of a process that is all ranks by itself. Unset: a process is one rank.
  Communicator (*alone)() = nullptr;
  /// Runs ranks in this process. Unset: each rank is a process.
  void (*run)(int ranks, const Program& program, std::chrono::milliseconds limit) = nullptr;
};

/// Makes a world over a connection. `family` records the operations of its groups. If the transport moves host memory and the device of
/// `traits` is not the CPU, tensors go through host memory.
Communicator world_over(Connection connection, GroupTraits traits, std::shared_ptr<LinkFamily> family = nullptr);

}  // namespace tessera
