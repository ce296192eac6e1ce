#include "tessera/comm/gloo/gloo_link.h"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/backend/backend_hub.h"
#include "tessera/comm/backend/backend_link.h"
#include "tessera/comm/backend/no_sigpipe.h"

namespace tessera {

std::unique_ptr<Link> gloo_link(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GlooOptions& options) {
  const NoSigpipe no_sigpipe;
  try {
    const auto settings = c10d::ProcessGroupGloo::Options::create(options.start_limit);
    settings->threads = 1;  // point-to-point messages need no more
    if (const auto interface = env("GLOO_SOCKET_IFNAME")) {
      settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(*interface));
    } else if (!options.address.empty()) {
      settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
    } else {
      settings->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    }
    const auto connections = c10::make_intrusive<c10d::PrefixStore>("gloo", store);
    const auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(connections, rank, size, settings);
    return own_backend_link(backend, store);
  } catch (const std::exception& error) {
    throw CommError(
        fmt::format("rank {}: gloo can't connect the {} ranks within {} s: {}. Can the hosts reach each other? "
                    "GLOO_SOCKET_IFNAME names the network interface to use",
                    rank, size, std::chrono::duration<double>(options.start_limit).count(), backend_error_text(error)));
  }
}

}  // namespace tessera
