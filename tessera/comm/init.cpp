#include "tessera/comm/init.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/base/env.h"
#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tessera/base/last_words.h"
#include "tessera/base/launch_record.h"
#include "tessera/base/launcher.h"
#include "tessera/base/log.h"
#include "tessera/comm/backend/backend_link.h"
#include "tessera/comm/gloo/gloo_link.h"
#include "tessera/comm/host/envelope.h"
#include "tessera/comm/host/host_transport.h"
#include "tessera/comm/host/rendezvous.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/shm/shm_link.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"auto", "self", "shm", "gloo"};

TransportKind chosen_transport(TransportKind wanted) {
  const auto given = env_choice("TESSERA_TRANSPORT", kNames);
  return given ? static_cast<TransportKind>(*given) : wanted;
}

/// Numbers hosts by their names.
Topology topology_of(std::span<const std::string> host_names) {
  std::vector<int> host_of;
  for (const auto& name : host_names) host_of.push_back(static_cast<int>(std::ranges::find(host_names, name) - host_names.begin()));
  return Topology(host_of);
}

/// Exchanges host names over a link between ranks that have not met in a store.
Topology find_hosts(Link& link, std::chrono::milliseconds limit) {
  try {
    return topology_of(all_gather_texts(link, host_id(), Clock::now() + limit));
  } catch (const LinkFailure& failure) {
    throw CommError(fmt::format("rank {} can't start: {}", link.rank(), why_not_started(failure)));
  }
}

/// Returns after a barrier of all ranks, so no rank needs the store any more to join.
Communicator wrap(std::string name, Topology topology, std::unique_ptr<Link> link, const InitOptions& options, const StorePtr& store) {
  const auto family = std::make_shared<LinkFamily>();
  if (store) family->look_out(store, {.rank = link->rank(), .world_size = link->size()});
  const Communicator world(host_transport({.name = std::move(name), .topology = std::move(topology)}, std::move(link), family),
                           options.operation_limit);
  world.with_limit(options.start_limit).barrier({.unit = "start"});
  world.reset_traffic();
  return world;
}

/// What each rank tells the others at the start: its host, and the transport that it wants.
struct Introduction {
  std::string host;
  std::string transport;
};

std::vector<Introduction> introduce(const StorePtr& store, const Identity& identity, TransportKind kind, const StartWait& wait) {
  const auto own = fmt::format("{}\n{}", kNames[static_cast<size_t>(kind)], host_id());
  std::vector<Introduction> ranks;
  for (const auto& text : exchange(store, identity, "introduction", own, wait)) {
    const auto line = text.find('\n');
    ranks.push_back({.host = text.substr(line + 1), .transport = text.substr(0, line)});
  }
  for (size_t rank = 0; rank < ranks.size(); rank++) {
    if (ranks[rank].transport != ranks.front().transport) {
      throw ConfigError(fmt::format("rank 0 wants transport {}, but rank {} wants {}; set TESSERA_TRANSPORT alike on all",
                                    ranks.front().transport, rank, ranks[rank].transport));
    }
  }
  return ranks;
}

/// Warns of an address that other hosts can't reach. Needed only if there are several hosts.
void warn_of_loopback(const std::string& address) {
  if (env("GLOO_SOCKET_IFNAME") || !(address.starts_with("127.") || address == "::1")) return;
  log(LogLevel::Warning, fmt::format("gloo listens at {}, which other hosts can't reach; if the ranks do not connect, name the network "
                                     "interface in GLOO_SOCKET_IFNAME, or this host's real address in MASTER_ADDR",
                                     address));
}

/// Warns if the ranks of this host together compute with more threads than there are cores. Launchers set OMP_NUM_THREADS to prevent that.
void warn_of_threads(int rank, int ranks_here) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (rank != 0 || ranks_here == 1 || env("OMP_NUM_THREADS") || at::get_num_threads() * ranks_here <= cores) return;
  log(LogLevel::Warning, fmt::format("each of the {} ranks here computes with {} threads, on {} cores; OMP_NUM_THREADS={} would be faster",
                                     ranks_here, at::get_num_threads(), cores, std::max(1, cores / ranks_here)));
}

/// Sets the rank of log lines. Rank 0 warns of unknown environment variables, once, for all ranks.
void start_log(int rank) {
  set_log_rank(rank);
  static std::once_flag once;
  if (rank != 0) return;
  std::call_once(once, [] {
    if (const auto warning = warning_of_unknown_env()) log(LogLevel::Warning, *warning);
  });
}

Communicator lone_world(const InitOptions& options) {
  const auto kind = chosen_transport(options.transport);
  if (kind != TransportKind::Auto && kind != TransportKind::Self) {
    throw ConfigError(
        fmt::format("transport {} needs ranks, but RANK and WORLD_SIZE are not set; start the program with torchrun or mpirun",
                    kNames[static_cast<size_t>(kind)]));
  }
  start_log(0);
  return self_world().with_limit(options.operation_limit);
}

/// The wait of a start that begins now.
StartWait start_wait(const InitOptions& options, std::string place) {
  const auto now = Clock::now();
  return {.end = now + options.start_limit, .notice = now + options.start_notice, .place = std::move(place)};
}

Communicator join(const StorePtr& store, const Identity& identity, const InitOptions& options, const StartWait& wait) {
  const auto [rank, world_size] = identity;
  const auto end = wait.end;
  const auto kind = chosen_transport(options.transport);
  const StorePtr own_store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("world{}", next_round(store, rank)), store);
  const auto ranks = introduce(own_store, identity, kind, wait);
  std::vector<std::string> host_names;
  for (const auto& each : ranks) host_names.push_back(each.host);
  const auto topology = topology_of(host_names);
  const bool one_host = topology.hosts() == 1;

  warn_of_threads(rank, static_cast<int>(topology.ranks_on(topology.host_of(rank)).size()));
  if (kind == TransportKind::Self && world_size > 1) {
    throw ConfigError(fmt::format("transport self is for a lone process; this world has {} ranks", world_size));
  }
  if (kind == TransportKind::Shm && !one_host) {
    throw ConfigError("transport shm is for ranks of one host, but these are on several; use gloo, or auto");
  }
  if (world_size == 1 && kind != TransportKind::Gloo && kind != TransportKind::Shm) return self_world().with_limit(options.operation_limit);
  if (one_host && kind != TransportKind::Gloo) {
    auto attempt = shm_link(own_store, identity, end);
    if (attempt.link) return wrap("shm", topology, std::move(attempt.link), options, own_store);
    if (kind == TransportKind::Shm) throw CommError(attempt.why_not);
    log(rank == 0 ? LogLevel::Warning : LogLevel::Debug, attempt.why_not + "; talking over gloo instead");
  }
  const auto address = address_towards_master(end);
  if (!one_host) warn_of_loopback(address);
  return wrap("gloo", topology, gloo_link(own_store, rank, world_size, {.address = address, .start_limit = options.start_limit}), options,
              own_store);
}

}  // namespace

Communicator init(const InitOptions& options) {
  const auto identity = identity_from_environment();
  if (!identity) return lone_world(options);
  say_last_words();
  record_start(identity->rank);
  start_log(identity->rank);
  const auto store = store_from_environment(*identity, start_wait(options, meeting_place()));
  auto world = join(store, *identity, options, start_wait(options, meeting_place()));
  record_joined(identity->rank);
  return world;
}

Communicator init(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, const InitOptions& options) {
  if (!store) throw UsageError("init needs a store to meet in; this one is null");
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw UsageError(fmt::format("there is no rank {} in a world of {}", rank, world_size));
  }
  start_log(rank);
  return join(store, {.rank = rank, .world_size = world_size}, options, start_wait(options, "in the store of the program"));
}

Communicator init(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const InitOptions& options) {
  if (!group) throw UsageError("init was given a process group that is null");
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& error) {
    throw UsageError(fmt::format("the process group has no backend that moves host memory: {}", error.what()));
  }
  start_log(backend->getRank());
  auto link = backend_link(backend, group->getStore(), options.start_limit);
  StorePtr store;
  if (group->getStore()) {
    const auto prefix = fmt::format("tessera/world{}", next_round(group->getStore(), backend->getRank()));
    store = c10::make_intrusive<c10d::PrefixStore>(prefix, group->getStore());
  }
  auto topology = find_hosts(*link, options.start_limit);
  return wrap(backend->getBackendName(), std::move(topology), std::move(link), options, store);
}

int local_rank() {
  if (const auto known = local_rank_from_environment()) return *known;
  const auto identity = identity_from_environment();
  if (!identity || identity->world_size == 1) return 0;
  throw ConfigError("LOCAL_RANK is not set: the launcher has to say which number this rank has on its host");
}

}  // namespace tessera
