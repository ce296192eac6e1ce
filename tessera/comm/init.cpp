#include "tessera/comm/init.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/gloo/gloo_link.h"
#include "tessera/comm/host_transport.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/shm/shm_link.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"auto", "self", "shm", "gloo"};

TransportKind chosen_transport(TransportKind wanted) {
  const auto given = env("TESSERA_TRANSPORT");
  if (!given) return wanted;
  const auto found = std::ranges::find(kNames, *given);
  if (found == kNames.end()) {
    throw ConfigError(fmt::format("TESSERA_TRANSPORT='{}' names no transport; choose one of {}", *given, fmt::join(kNames, ", ")));
  }
  return static_cast<TransportKind>(found - kNames.begin());
}

/// A world whose ranks have all heard from each other: nobody needs the store any more to get in.
Communicator wrap(std::string name, std::unique_ptr<Link> link, const InitOptions& options) {
  const Communicator world(host_transport(std::move(name), std::move(link)), options.operation_limit);
  world.with_limit(options.start_limit).barrier({.unit = "start"});
  world.reset_traffic();
  return world;
}

/// With more than one host, an address that only this host can reach is a trap.
void warn_of_loopback(const std::string& address, const std::vector<std::string>& hosts) {
  const bool several = std::ranges::any_of(hosts, [&](const auto& host) { return host != hosts.front(); });
  if (several && !env("GLOO_SOCKET_IFNAME") && (address.starts_with("127.") || address == "::1")) {
    log(LogLevel::Warning, fmt::format("gloo listens at {}, which other hosts can't reach; if the ranks do not connect, name the network "
                                       "interface in GLOO_SOCKET_IFNAME, or this host's real address in MASTER_ADDR",
                                       address));
  }
}

Communicator lone_world(const InitOptions& options) {
  const auto kind = chosen_transport(options.transport);
  if (kind != TransportKind::Auto && kind != TransportKind::Self) {
    throw ConfigError(
        fmt::format("transport {} needs ranks, but RANK and WORLD_SIZE are not set; start the program with torchrun or mpirun",
                    kNames[static_cast<size_t>(kind)]));
  }
  set_log_rank(0);
  return self_world().with_limit(options.operation_limit);
}

}  // namespace

Communicator init(const InitOptions& options) {
  const auto identity = identity_from_environment();
  if (!identity) return lone_world(options);
  return init(store_from_environment(*identity, options.start_limit), identity->rank, identity->world_size, options);
}

Communicator init(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, const InitOptions& options) {
  if (!store) throw UsageError("init needs a store to meet in; this one is null");
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw UsageError(fmt::format("there is no rank {} in a world of {}", rank, world_size));
  }
  const Identity identity{.rank = rank, .world_size = world_size};
  set_log_rank(rank);
  // Each world of a program that has several gets keys of its own.
  const auto round = store->add(fmt::format("world/{}", rank), 1);
  const StorePtr own_store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("world{}", round), store);
  const auto hosts = exchange(*own_store, identity, "host", host_id(), options.start_limit);
  const bool one_host = std::ranges::all_of(hosts, [&](const auto& host) { return host == hosts.front(); });

  auto kind = chosen_transport(options.transport);
  if (kind == TransportKind::Self && world_size > 1) {
    throw ConfigError(fmt::format("transport self is for a lone process; this world has {} ranks", world_size));
  }
  if (kind == TransportKind::Shm && !one_host) {
    throw ConfigError("transport shm is for ranks of one host, but these are on several; use gloo, or auto");
  }
  if (world_size == 1 && kind != TransportKind::Gloo && kind != TransportKind::Shm) return self_world().with_limit(options.operation_limit);
  if (one_host && kind != TransportKind::Gloo) {
    auto attempt = shm_link(*own_store, identity, options.start_limit);
    if (attempt.link) return wrap("shm", std::move(attempt.link), options);
    if (kind == TransportKind::Shm) throw CommError(attempt.why_not);
    log(rank == 0 ? LogLevel::Warning : LogLevel::Debug, attempt.why_not + "; talking over gloo instead");
  }
  const auto address = address_towards_master();
  warn_of_loopback(address, hosts);
  return wrap("gloo", gloo_link(own_store, rank, world_size, {.address = address, .start_limit = options.start_limit}), options);
}

Communicator init(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const InitOptions& options) {
  if (!group) throw UsageError("init was given a process group that is null");
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& error) {
    throw UsageError(fmt::format("the process group has no backend that moves host memory: {}", error.what()));
  }
  set_log_rank(backend->getRank());
  return wrap(backend->getBackendName(), backend_link(backend, group->getStore()), options);
}

}  // namespace tessera
