#include "tessera/comm/fake/fake.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/comm/host/host_transport.h"
#include "tessera/comm/self/loopback_link.h"

namespace tessera {

Communicator fake_world(int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size) throw UsageError(fmt::format("there is no rank {} in a world of {}", rank, size));
  return Communicator(host_transport({.name = "fake", .simulated = true}, std::make_unique<LoopbackLink>(rank, all_ranks(size))));
}

}  // namespace tessera
