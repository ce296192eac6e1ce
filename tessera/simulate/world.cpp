#include "tessera/simulate/world.h"

#include <algorithm>

#include "tessera/comm/engine.h"
#include "tessera/comm/host/host_transport.h"
#include "tessera/comm/levels/connect.h"
#include "tessera/comm/self/loopback_link.h"
#include "tessera/simulate/machine.h"
#include "tessera/simulate/network.h"

namespace tessera::simulate {
namespace {

class SimulatedLink final : public LoopbackLink {
 public:
  /// `shares`: whether ranks of a host share memory, as they do on CPUs.
  SimulatedLink(int rank, std::vector<int> world_ranks, Topology topology, bool shares)
      : LoopbackLink(rank, std::move(world_ranks)), topology_(std::move(topology)), shares_(shares) {}

  std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point /*deadline*/) override {
    const auto position = std::ranges::find(members, rank()) - members.begin();
    return std::make_unique<SimulatedLink>(static_cast<int>(position), part_of_world(members), topology_.part(members), shares_);
  }
  SharedAttempt share(const AreaShape& shape, Clock::time_point /*deadline*/) override {
    if (!shares_) return {.area = nullptr, .why_not = "the ranks of this machine compute on devices of their own"};
    return share_with_nobody(shape, topology_.ranks_on(topology_.host_of(rank())).size());
  }

 private:
  const Topology topology_;
  const bool shares_;
};

class SimulatedTransport final : public HostTransport {
 public:
  SimulatedTransport(GroupTraits traits, std::shared_ptr<Link> link, const Machine& machine, CountTraffic count)
      : HostTransport(std::move(traits), std::move(link)), machine_(machine), count_(std::move(count)) {}

  Moved run(const Request& request, const Launch& start) override {
    auto moved = HostTransport::run(request, start);
    double bytes = 0;
    for (const auto& piece : request.pieces) {
      const auto dtype = request.reduction.wire_dtype.value_or(piece.whole.scalar_type());
      bytes += static_cast<double>(piece.whole.numel()) * static_cast<double>(c10::elementSize(dtype));
    }
    const auto& topology = traits().topology;
    const auto levels = traits().levels;
    if (levels == 2) {  // each byte crosses once for each other host, and the ranks of a host share that
      const auto here = static_cast<double>(topology.ranks_on(topology.host_of(traits().local_ranks.front())).size());
      moved.across = static_cast<uint64_t>(bytes * (topology.hosts() - 1) / topology.hosts() / here);
    }
    const auto seconds = collective_seconds(machine_, request.operation, bytes, topology, levels, request.whole_of);
    count_(request.operation, seconds, moved.bytes, moved.across);
    return moved;
  }

  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part) override {
    auto of_part = with_ranks_of(*part, traits(), colors);
    if (of_part.topology.hosts() == 1) of_part.levels = 1;
    return std::make_unique<SimulatedTransport>(std::move(of_part), std::move(part), machine_, count_);
  }

 private:
  const Machine& machine_;
  const CountTraffic count_;
};

}  // namespace

Communicator simulated_world(const Topology& topology, const Machine& machine, const CountTraffic& count) {
  const auto ranks = topology.ranks();
  auto link = std::make_shared<SimulatedLink>(0, all_ranks(ranks), topology, machine.kind == "cpu");
  const bool has_levels = topology.hosts() > 1 && machine.kind == "cpu" && most_levels() == 2;
  GroupTraits traits{.name = "simulated", .simulated = true, .size = ranks, .topology = topology, .levels = has_levels ? 2 : 1};
  auto transport = std::make_unique<SimulatedTransport>(std::move(traits), link, machine, count);
  const GroupTraits own = transport->traits();
  return world_over({.link = std::move(link), .transport = std::move(transport)}, own);
}

}  // namespace tessera::simulate
