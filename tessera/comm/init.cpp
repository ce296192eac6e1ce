#include "tessera/comm/init.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/base/env.h"
#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tessera/base/last_words.h"
#include "tessera/base/launch_record.h"
#include "tessera/base/launcher.h"
#include "tessera/base/loaded_libtorch.h"
#include "tessera/base/log.h"
#include "tessera/comm/backend/backend_link.h"
#include "tessera/comm/control/link_family.h"
#include "tessera/comm/device/own_device.h"
#include "tessera/comm/engines.h"
#include "tessera/comm/host/addresses.h"
#include "tessera/comm/host/rendezvous.h"
#include "tessera/comm/joined_world.h"
#include "tessera/comm/levels/connect.h"
#include "tessera/comm/mpi/mpi_meeting.h"
#include "tessera/comm/run_facts.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/simulation.h"

namespace tessera {
namespace {

constexpr std::string_view kAuto = "auto";
constexpr std::string_view kXla = "xla";

/// The names by which a launched program can ask for an engine.
std::vector<std::string_view> transport_names() {
  std::vector<std::string_view> names = {kAuto};
  for (const auto& engine : engines()) {
    if (engine.connect != nullptr || engine.alone != nullptr || engine.automatic) names.push_back(engine.name);
  }
  return names;
}

std::string chosen_transport(const InitOptions& options) {
  const auto names = transport_names();
  // `tessera launch` sets TESSERA_TRANSPORT=xla where the device or the configuration asks for XLA.
  if ((options.transport.empty() ? env("TESSERA_TRANSPORT") : options.transport) == kXla && std::ranges::find(names, kXla) == names.end())
    throw ConfigError(why_none_of(kXla));
  if (options.transport.empty()) {
    const auto given = env_choice("TESSERA_TRANSPORT", names);
    return std::string(given ? names[*given] : kAuto);
  }
  if (std::ranges::find(names, options.transport) != names.end()) return options.transport;
  throw UsageError("no transport of a launched program is called '{}'; there are {}", options.transport, joined(names));
}

/// Numbers hosts by their names.
Topology topology_of(std::span<const std::string> host_names) {
  std::vector<int> host_of;
  for (const auto& name : host_names) host_of.push_back(static_cast<int>(std::ranges::find(host_names, name) - host_names.begin()));
  return Topology(host_of);
}

std::string own_host(const InitOptions& options) {
  return options.host.empty() ? host_id() : options.host;
}

/// Exchanges host names over a link between ranks that have not met in a store.
std::vector<std::string> find_hosts(Link& link, const InitOptions& options) {
  try {
    return all_gather_texts(link, own_host(options), Clock::now() + options.start_limit);
  } catch (const LinkFailure& failure) {
    throw CommError("rank {} can't start: {}", link.rank(), why_not_started(failure));
  }
}

/// `store`: where the ranks have met; may be null.
std::shared_ptr<LinkFamily> family_of(const RunStart& start, const StorePtr& store) {
  auto family = std::make_shared<LinkFamily>();
  start_run(family->record(), start);
  if (store) family->monitor_peers(store, {.rank = start.rank, .world_size = static_cast<int>(start.hosts.size())});
  return family;
}

/// Makes the world, and returns after a barrier of all ranks, so no rank needs the store any more to join.
Communicator wrap(GroupTraits traits, Connection connection, const InitOptions& options, const StorePtr& store, const RunStart& start) {
  const auto world = world_over(std::move(connection), std::move(traits), family_of(start, store));
  world.with_limit(options.start_limit).barrier({.unit = "start"});
  world.reset_traffic();
  return world.with_limit(options.operation_limit);
}

/// Sent by each rank to the others at the start: its host, the transport that it wants, and the device of its tensors.
struct Introduction {
  std::string transport;
  c10::Device device;
  std::string device_name;  // see name_on_host()
  std::string host;
  std::string levels;
};

std::vector<Introduction> introduce(const StorePtr& store, const Identity& identity, const Introduction& own, const StartWait& wait) {
  std::vector<Introduction> ranks;
  const auto words = fmt::format("{}\n{}\n{}\n{}\n{}", own.transport, own.device.str(), own.device_name, own.host, own.levels);
  for (const auto& text : exchange(store, identity, "introduction", words, wait)) {
    std::istringstream lines(text);
    std::array<std::string, 5> line;
    for (auto& each : line) std::getline(lines, each);
    ranks.push_back({.transport = line[0], .device = c10::Device(line[1]), .device_name = line[2], .host = line[3], .levels = line[4]});
  }
  const auto& one = ranks.front();
  for (size_t rank = 0; rank < ranks.size(); rank++) {
    const auto& other = ranks[rank];
    if (other.transport != one.transport) {
      throw ConfigError("rank 0 wants transport {}, but rank {} wants {}; set the same TESSERA_TRANSPORT on all ranks", one.transport, rank,
                        other.transport);
    }
    if (other.levels != one.levels) {
      throw ConfigError("rank 0 wants {} levels, but rank {} wants {}; set the same TESSERA_LEVELS on all ranks", one.levels, rank,
                        other.levels);
    }
    if (other.device.type() != one.device.type()) {
      throw ConfigError("rank 0 has its tensors on {}, but rank {} on {}; set the same InitOptions::device or TESSERA_DEVICE on all ranks",
                        one.device.str(), rank, other.device.str());
    }
  }
  return ranks;
}

/// Two ranks that share a device; nothing if each has its own.
std::optional<std::pair<size_t, size_t>> sharers(std::span<const Introduction> ranks) {
  for (size_t b = 0; b < ranks.size(); b++) {
    for (size_t a = 0; a < b; a++) {
      if (ranks[a].host == ranks[b].host && ranks[a].device_name == ranks[b].device_name) return std::pair(a, b);
    }
  }
  return std::nullopt;
}

/// The device of this rank's tensors. If the options name no device, and TESSERA_DEVICE is unset or cpu, a named transport decides, because
/// some transports serve only one kind of device.
c10::Device device_of(const InitOptions& options, const std::string& transport, int local_rank) {
  auto wanted = options.device.value_or(default_device());
  if (transport != kAuto && !options.device && wanted.is_cpu()) wanted = c10::Device(engine_named(transport).device);
  const auto own = own_device(wanted, local_rank);
  make_current(own);
  return own;
}

/// Warns if the ranks of this host together compute with more threads than there are cores. Launchers set OMP_NUM_THREADS to prevent that.
void warn_of_threads(int rank, int ranks_here) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const int threads = at::get_num_threads();
  if (rank != 0 || ranks_here == 1 || threads == 1 || env("OMP_NUM_THREADS") || threads * ranks_here <= cores) return;
  log(LogLevel::Warning, "each of the {} ranks here computes with {} threads, on {} cores; OMP_NUM_THREADS={} would be faster", ranks_here,
      threads, cores, std::max(1, cores / ranks_here));
}

/// Throws if the loaded libtorch does not fit. Sets the rank of log lines. Rank 0 warns of unknown environment variables, once, for all ranks.
void start_log(int rank) {
  expect_fitting_libtorch();
  set_log_rank(rank);
  static std::once_flag once;
  if (rank != 0) return;
  std::call_once(once, [] {
    if (const auto warning = warning_of_unknown_env()) log(LogLevel::Warning, *warning);
  });
}

/// Returns the world of a process that is all ranks, or the only one.
Communicator started_alone(Communicator world, const InitOptions& options) {
  const std::vector<std::string> hosts(static_cast<size_t>(world.size()), own_host(options));
  const auto& traits = world.traits();
  start_run(world.record(), {.rank = world.local_ranks().front(), .engine = traits.name, .device = traits.device.type(), .hosts = hosts});
  return world;
}

/// Makes the world of a process that is all ranks, if the options or the environment name an engine for that, or the device of such an
/// engine. Otherwise returns nothing.
std::optional<Communicator> world_of_this_process(const InitOptions& options) {
  const auto transport = chosen_transport(options);
  const auto device = options.device.value_or(default_device()).type();
  const auto engine = std::ranges::find_if(engines(), [&](const Engine& each) {
    return each.alone != nullptr && (transport == each.name || (transport == kAuto && device == each.device));
  });
  if (engine == engines().end()) return std::nullopt;
  start_log(0);
  return started_alone(engine->alone().with_limit(options.operation_limit), options);
}

Communicator lone_world(const InitOptions& options) {
  const auto transport = chosen_transport(options);
  if (transport != kAuto && engine_named(transport).reach != Engine::Reach::OneRank) {
    throw ConfigError("transport {} needs ranks, but RANK and WORLD_SIZE are not set; start the program with tessera launch, torchrun or mpirun",
                      transport);
  }
  start_log(0);
  return started_alone(self_world(0, device_of(options, transport, 0)).with_limit(options.operation_limit), options);
}

/// The wait of a start that begins now.
StartWait start_wait(const InitOptions& options, std::string place) {
  const auto now = Clock::now();
  return {.end = now + options.start_limit, .notice = now + options.start_notice, .place = std::move(place)};
}

/// Why the engine can't serve these ranks; empty if it can.
std::string why_unfit(const Engine& engine, const Topology& topology, std::span<const Introduction> ranks) {
  if (engine.reach == Engine::Reach::OneRank && topology.ranks() > 1) {
    return fmt::format("transport {} is for a lone process; this world has {} ranks", engine.name, topology.ranks());
  }
  if (engine.reach == Engine::Reach::OneHost && topology.hosts() > 1) {
    return fmt::format("transport {} is for ranks of one host, but these are on several; use gloo, or auto", engine.name);
  }
  if (engine.device == c10::kCPU) return {};
  if (const auto device = ranks.front().device; engine.device != device.type()) {
    return fmt::format("transport {} moves tensors that are on {}, but the ranks have theirs on {}", engine.name,
                       c10::DeviceTypeName(engine.device, /*lower_case=*/true), device.str());
  }
  if (auto why = engine.why_not(); !why.empty()) return fmt::format("transport {}: {}", engine.name, why);
  if (const auto both = sharers(ranks)) {
    return fmt::format(
        "transport {}: ranks {} and {} share the device {}, but each needs its own; transport auto moves their data through host memory",
        engine.name, both->first, both->second, ranks[both->first].device_name);
  }
  return {};
}

/// The engines to try, in this order: engines for the device come before engines that move host memory.
std::vector<Engine> candidates(const std::string& transport, c10::Device device) {
  std::vector<Engine> found;
  for (const auto& engine : engines()) {
    if (transport == kAuto ? engine.automatic : transport == engine.name) found.push_back(engine);
  }
  std::ranges::stable_partition(
      found, [&](const Engine& engine) { return engine.reach == Engine::Reach::OneRank || engine.device == device.type(); });
  return found;
}

/// `store_host`: where the store is, if the environment does not say.
Communicator join(const StorePtr& store, const Identity& identity, const InitOptions& options, const StartWait& wait,
                  const std::string& store_host = {}) {
  const auto transport = chosen_transport(options);
  const StorePtr own_store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("world{}", next_round(store, identity.rank)), store);
  const auto device = device_of(options, transport, local_rank_from_environment().value_or(identity.rank));
  const auto levels = most_levels();
  const auto ranks = introduce(own_store, identity,
                               {.transport = transport,
                                .device = device,
                                .device_name = name_on_host(device),
                                .host = own_host(options),
                                .levels = std::to_string(levels)},
                               wait);
  std::vector<std::string> host_names;
  for (const auto& each : ranks) host_names.push_back(each.host);
  const Meeting meeting{.store = own_store,
                        .identity = identity,
                        .topology = topology_of(host_names),
                        .device = device,
                        .store_host = store_host,
                        .start_limit = options.start_limit,
                        .end = wait.end};
  const auto& topology = meeting.topology;
  warn_of_threads(identity.rank, static_cast<int>(topology.ranks_on(topology.host_of(identity.rank)).size()));
  std::string trouble;  // why the previous engine can't be used
  for (const auto& engine : candidates(transport, device)) {
    if (auto why = why_unfit(engine, topology, ranks); !why.empty()) {
      if (transport != kAuto) throw ConfigError(why);
      if (engine.device == device.type() && !device.is_cpu()) trouble = std::move(why);
      continue;
    }
    const RunStart start{.rank = identity.rank, .engine = std::string(engine.name), .device = device.type(), .hosts = host_names};
    if (engine.connect == nullptr) return self_world(0, device, family_of(start, own_store)).with_limit(options.operation_limit);
    if (!trouble.empty()) {
      log(identity.rank == 0 ? LogLevel::Warning : LogLevel::Debug, fmt::format("{}; talking over {} instead", trouble, engine.name));
    }
    auto connection = engine.connect(meeting);
    if (connection.link) {
      if (engine.two_levels && levels == 2) connection = with_two_levels(std::move(connection), meeting);
      return wrap({.name = std::string(engine.name), .topology = topology, .device = device}, std::move(connection), options, own_store,
                  start);
    }
    if (transport != kAuto) throw CommError(connection.why_not);
    trouble = std::move(connection.why_not);
  }
  throw CommError(trouble);
}

}  // namespace

Communicator init(const InitOptions& options) {
  if (env("TESSERA_DRY_RUN")) {
    start_log(0);
    return remember_joined(Simulation::world(options.operation_limit));
  }
  const auto identity = identity_from_environment();
  if (identity) {
    say_last_words();
    record_start(identity->rank);
  }
  if (auto world = world_of_this_process(options)) {
    if (identity) record_joined(identity->rank);
    return remember_joined(*world);
  }
  if (!identity) return remember_joined(lone_world(options));
  start_log(identity->rank);
  // A wrong setting ends every rank here, before one waits for another.
  most_levels();
  silence_limit();
  const auto store = store_from_environment(*identity, start_wait(options, meeting_place()));
  auto world = join(store, *identity, options, start_wait(options, meeting_place()));
  record_joined(identity->rank);
  return remember_joined(world);
}

Communicator init(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, const InitOptions& options) {
  if (!store) throw UsageError("init needs a store to meet in; this one is null");
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw UsageError("there is no rank {} in a world of {}", rank, world_size);
  }
  start_log(rank);
  return remember_joined(
      join(store, {.rank = rank, .world_size = world_size}, options, start_wait(options, "in the store of the program")));
}

Communicator init(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const InitOptions& options) {
  if (!group) throw UsageError("init was given a process group that is null");
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& error) {
    throw UsageError("the process group has no backend that moves host memory: {}", error.what());
  }
  start_log(backend->getRank());
  auto link = backend_link(backend, group->getStore(), options.start_limit);
  StorePtr store;
  if (group->getStore()) {
    const auto prefix = fmt::format("tessera/world{}", next_round(group->getStore(), backend->getRank()));
    store = c10::make_intrusive<c10d::PrefixStore>(prefix, group->getStore());
  }
  const auto hosts = find_hosts(*link, options);
  const auto device = device_of(options, std::string(kAuto), local_rank_from_environment().value_or(backend->getRank()));
  GroupTraits traits{.name = backend->getBackendName(), .topology = topology_of(hosts), .device = device};
  const RunStart start{.rank = backend->getRank(), .engine = backend->getBackendName(), .device = device.type(), .hosts = hosts};
  return remember_joined(wrap(std::move(traits), {.link = std::move(link)}, options, store, start));
}

Communicator init(const MpiCommunicator& communicator, const InitOptions& options) {
  const MpiMeeting meeting(communicator.library, communicator.handle, own_host(options), options.transport, options.start_limit);
  start_log(meeting.identity().rank);
  auto with_transport = options;
  with_transport.transport = meeting.transport();
  return remember_joined(join(meeting.store(), meeting.identity(), with_transport, start_wait(options, "over MPI"), meeting.host()));
}

int local_rank() {
  if (const auto known = local_rank_from_environment()) return *known;
  const auto identity = identity_from_environment();
  if (!identity || identity->world_size == 1) return 0;
  throw ConfigError("LOCAL_RANK is not set; set it to the number of this rank on its host, or start the program with tessera launch");
}

}  // namespace tessera
