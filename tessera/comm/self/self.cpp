#include "tessera/comm/self/self.h"

#include "tessera/base/launcher.h"
#include "tessera/comm/device/lone_transport.h"
#include "tessera/comm/device/own_device.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/self/loopback_link.h"

namespace tessera {

Communicator self_world(int world_rank, std::optional<c10::Device> wanted) {
  const auto device = own_device(wanted.value_or(default_device()), local_rank_from_environment().value_or(0));
  if (device.is_cpu()) return world_over({.link = std::make_unique<LoopbackLink>(0, std::vector{world_rank})}, {.name = "self"});
  const GroupTraits traits{.name = "self", .world_ranks = {world_rank}, .device = device};
  return world_over({.link = nullptr, .why_not = {}, .transport = std::make_unique<LoneTransport>(traits)}, traits);
}

}  // namespace tessera
