#include "tessera/comm/gloo/gloo_link.h"

#include <ATen/Context.h>
#include <ATen/Version.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/backend/backend_hub.h"
#include "tessera/comm/backend/backend_link.h"
#include "tessera/comm/backend/no_sigpipe.h"
#include "tessera/comm/gloo/membership.h"

namespace tessera {
namespace {

/// Warns of an address that other hosts can't reach. Called only if there are several hosts.
void warn_of_loopback(const std::string& address) {
  if (env("GLOO_SOCKET_IFNAME") || !(address.starts_with("127.") || address == "::1")) return;
  log(LogLevel::Warning,
      "gloo listens at {}, which other hosts can't reach; if the ranks do not connect, name the network "
      "interface in GLOO_SOCKET_IFNAME, or this host's real address in MASTER_ADDR",
      address);
}

}  // namespace

std::string why_no_gloo() {
  return at::show_config().find("USE_GLOO=0") == std::string::npos ? "" : "not in this libtorch";
}

std::string gloo_address(const Meeting& meeting) {
  auto address = address_towards_master(meeting.end);
  if (meeting.topology.hosts() > 1) warn_of_loopback(address);
  return address;
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const StorePtr& store, int rank, int size, const std::string& address,
                                            std::chrono::milliseconds limit) {
  const NoSigpipe no_sigpipe;
  try {
    const auto end = Clock::now() + limit;
    const auto settings = c10d::ProcessGroupGloo::Options::create(limit);
    settings->threads = 1;  // enough, because operations run one after the other
    const auto others = listening_sockets();
    if (const auto interface = env("GLOO_SOCKET_IFNAME")) {
      settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(*interface));
    } else if (!address.empty()) {
      settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
    } else {
      settings->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    }
    auto listeners = listening_sockets();
    std::erase_if(listeners, [&](int each) { return others.contains(each); });
    auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, settings);
    prove_membership(*backend, store, end);
    std::ranges::for_each(listeners, deafen);  // no more ranks will come
    return backend;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError(
        "rank {}: gloo can't connect the {} ranks within {} s: {}. Can the hosts reach each other? "
        "GLOO_SOCKET_IFNAME names the network interface to use",
        rank, size, std::chrono::duration<double>(limit).count(), backend_error_text(error));
  }
}

Connection connect_gloo(const Meeting& meeting) {
  const auto [rank, size] = meeting.identity;
  const auto connections = c10::make_intrusive<c10d::PrefixStore>("gloo", meeting.store);
  return {.link = own_backend_link(make_gloo(connections, rank, size, gloo_address(meeting), meeting.start_limit), meeting.store)};
}

}  // namespace tessera
