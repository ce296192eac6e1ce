#include "tessera/comm/c10d/connect.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/device/own_device.h"
#include "tessera/comm/gloo/gloo_link.h"
#include "tessera/comm/shm/shm_link.h"

namespace tessera {
namespace {

/// Makes the link over which the ranks agree while the backend moves their data: through shared memory on one host, by messages otherwise.
std::shared_ptr<Link> link_of_hosts(const Meeting& meeting) {
  if (meeting.topology.hosts() == 1) {
    if (auto attempt = connect_shm(meeting); attempt.link) return std::move(attempt.link);
  }
  return connect_gloo(meeting).link;
}

Connection connect(const Meeting& meeting, std::string_view name, c10::Device device, const CollectivesTransport::MakeBackend& make) {
  auto link = link_of_hosts(meeting);
  GroupTraits traits{.name = std::string(name), .topology = meeting.topology, .device = device, .sums = SumOrder::Any};
  auto backend = make("world", *link);
  auto transport = std::make_unique<CollectivesTransport>(std::move(traits), link, std::move(backend), make);
  return {.link = std::move(link), .transport = std::move(transport)};
}

}  // namespace

Connection connect_gloo_collectives(const Meeting& meeting) {
  const auto address = gloo_address(meeting);
  return connect(meeting, "gloo_collectives", c10::kCPU,
                 [store = meeting.store, address, limit = meeting.start_limit](const std::string& name, Link& part) {
                   const auto own = c10::make_intrusive<c10d::PrefixStore>("collectives/" + name, store);
                   return make_gloo(own, part.rank(), part.size(), address, limit);
                 });
}

#ifdef TESSERA_NCCL
std::string why_no_nccl() {
  return devices_here(c10::kCUDA) == 0 ? "no GPU here" : "";
}

Connection connect_nccl(const Meeting& meeting) {
  return connect(meeting, "nccl", meeting.device, [store = meeting.store](const std::string& name, Link& part) {
    return make_nccl(c10::make_intrusive<c10d::PrefixStore>("nccl/" + name, store), part.rank(), part.size());
  });
}
#else
std::string why_no_nccl() {
  return "this build has no CUDA; build with TESSERA_LINK_CUDA=ON";
}

Connection connect_nccl(const Meeting& /*meeting*/) {
  throw ConfigError("transport nccl: " + why_no_nccl());
}
#endif

}  // namespace tessera
