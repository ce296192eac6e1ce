#include "tessera/comm/gloo/gloo_link.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/backend/backend_hub.h"
#include "tessera/comm/backend/backend_link.h"
#include "tessera/comm/backend/no_sigpipe.h"
#include "tessera/comm/gloo/membership.h"
#include "tessera/comm/host/addresses.h"
#include "tessera/comm/host/bounded.h"
#include "tessera/comm/host/connection_watch.h"

namespace tessera {
namespace {

bool is_loopback_address(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

std::string address_key(int rank) {
  return fmt::format("address/{}", rank);
}

}  // namespace

std::string why_no_gloo() {
  return at::show_config().find("USE_GLOO=0") == std::string::npos ? "" : "not in this libtorch";
}

std::string gloo_address(const Meeting& meeting) {
  const auto& topology = meeting.topology;
  const int rank = meeting.identity.rank;
  auto own = address_towards(meeting.store_host.empty() ? meeting_point().host : meeting.store_host, meeting.end);
  if (topology.hosts() == 1 || env("GLOO_SOCKET_IFNAME")) return own;
  meeting.store->set(address_key(rank), own);
  // The name of the meeting point may lead to loopback on its own host, as on Debian. The address towards another host is right there, too.
  for (int host = 0; is_loopback_address(own) && host < topology.hosts(); host++) {
    if (host == topology.host_of(rank)) continue;
    const auto key = address_key(topology.ranks_on(host).front());
    meeting.store->wait({key}, time_until(meeting.end));
    if (const auto other = meeting.store->get_to_str(key); !is_loopback_address(other)) own = address_towards(other, meeting.end);
  }
  if (is_loopback_address(own)) {
    log(LogLevel::Warning,
        "gloo listens at {}, which other hosts can't reach; if the ranks do not connect, name the network "
        "interface in GLOO_SOCKET_IFNAME, or this host's real address in MASTER_ADDR",
        own);
  }
  return own;
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const StorePtr& store, int rank, int size, const std::string& address,
                                            std::chrono::milliseconds limit) {
  const NoSigpipe no_sigpipe;
  try {
    const auto end = Clock::now() + limit;
    const auto settings = c10d::ProcessGroupGloo::Options::create(limit);
    settings->threads = 1;  // enough, because operations run one after the other
    std::set<int> listeners;
    {
      // Ranks may be threads of one process: each must find the listener of its own device only.
      static std::mutex making_device;
      const std::lock_guard lock(making_device);
      const auto others = listening_sockets();
      if (const auto interface = env("GLOO_SOCKET_IFNAME")) {
        settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(*interface));
      } else if (!address.empty()) {
        settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
      } else {
        settings->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
      }
      listeners = listening_sockets();
      std::erase_if(listeners, [&](int each) { return others.contains(each); });
    }
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
  const bool far = meeting.topology.hosts() > 1;
  const auto limit = far ? silence_limit() : std::nullopt;
  const auto before = limit ? ConnectionWatch::connections() : ConnectionWatch::Connections();
  const auto backend = make_gloo(connections, rank, size, gloo_address(meeting), meeting.start_limit);
  const auto watch = limit ? std::make_shared<ConnectionWatch>(before, *limit) : nullptr;
  auto link = own_backend_link(backend, meeting.store, watch);
  if (!far) return {.link = std::move(link)};
  try {
    // Also without a watch, because other ranks may have another limit.
    auto addresses = all_gather_texts(*link, watch ? watch->own_address() : "", meeting.end);
    if (watch) watch->set_addresses(std::move(addresses));
  } catch (const LinkFailure& failure) {
    throw CommError("rank {} can't start: {}", rank, why_not_started(failure));
  }
  return {.link = std::move(link)};
}

}  // namespace tessera
