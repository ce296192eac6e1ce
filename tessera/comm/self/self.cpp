#include "tessera/comm/self/self.h"

#include <ATen/ATen.h>

#include <limits>

#include "tessera/base/launcher.h"
#include "tessera/comm/device/own_device.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/self/loopback_link.h"

namespace tessera {
namespace {

/// The transport of a lone rank on a device: it copies inputs to results on the stream of the caller. A LoopbackLink, as used on the CPU,
/// would cost each operation a switch to the group's thread and events between two streams.
class LoneTransport final : public Transport {
 public:
  using Transport::Transport;

  Moved run(const Request& request, const Launch& start) override {
    start.inputs.block();
    bool copies = request.has_parts();
    for (const auto& [whole, own, squares] : request.pieces) {
      if (squares) *squares = std::numeric_limits<double>::quiet_NaN();
      if (request.has_parts() && whole.const_data_ptr() == own.const_data_ptr()) continue;
      const auto& from = request.operation == Operation::AllGather ? own : whole;
      const auto sent = from.to(request.reduction.wire_dtype.value_or(from.scalar_type()));
      const auto& target = request.operation == Operation::AllGather ? whole : own;
      if (sent.is_same(target)) continue;
      target.view_as(sent).copy_(sent);
      copies = true;
    }
    return copies ? Moved{.ready = Event::later(traits().device)} : Moved{};
  }

  std::unique_ptr<Transport> split(std::span<const int> /*colors*/, std::shared_ptr<Link> /*part*/) override {
    return std::make_unique<LoneTransport>(traits());
  }
};

}  // namespace

Communicator self_world(int world_rank, std::optional<c10::Device> wanted, std::shared_ptr<LinkFamily> family) {
  const auto device = own_device(wanted.value_or(default_device()), local_rank_from_environment().value_or(0));
  const GroupTraits traits{.name = "self", .world_ranks = {world_rank}, .device = device};
  if (device.is_cpu()) return world_over({.link = std::make_unique<LoopbackLink>(0, traits.world_ranks)}, traits, std::move(family));
  return world_over({.transport = std::make_unique<LoneTransport>(traits)}, traits, std::move(family));
}

}  // namespace tessera
