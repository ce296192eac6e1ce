#include "tessera/comm/engine.h"

#include <utility>

#include "tessera/comm/control/group.h"
#include "tessera/comm/device/staged_transport.h"
#include "tessera/comm/levels/levels_transport.h"

namespace tessera {

Communicator world_over(Connection connection, GroupTraits traits, std::shared_ptr<LinkFamily> family) {
  auto link = std::move(connection.link);
  auto transport = std::move(connection.transport);
  const auto device = std::exchange(traits.device, c10::kCPU);
  if (!transport) transport = transport_over(std::move(traits), link);
  if (!device.is_cpu() && transport->traits().device.is_cpu()) transport = std::make_unique<StagedTransport>(device, std::move(transport));
  if (!family) {
    family = std::make_shared<LinkFamily>();
    if (link) family->record()->rank = link->rank();
  }
  return Communicator(std::make_shared<Group>(std::move(transport), std::move(link), std::move(family)));
}

}  // namespace tessera
