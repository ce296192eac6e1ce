#include "tessera/comm/engine.h"

#include "tessera/comm/control/group.h"
#include "tessera/comm/host/host_transport.h"

namespace tessera {

Communicator world_over(Connection connection, GroupTraits traits, std::shared_ptr<LinkFamily> family) {
  auto link = std::move(connection.link);
  auto transport = std::move(connection.transport);
  if (!transport) transport = std::make_unique<HostTransport>(std::move(traits), link);
  if (!family) family = std::make_shared<LinkFamily>();
  return Communicator(std::make_shared<Group>(std::move(transport), std::move(link), std::move(family)));
}

}  // namespace tessera
