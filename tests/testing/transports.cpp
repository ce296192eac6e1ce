#include "tests/testing/transports.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/engines.h"
#include "tessera/comm/init.h"
#include "tessera/comm/threads/run_ranks.h"

namespace tessera::testing {
namespace {

constexpr int kRanks[] = {1, 2, 3, 4, 7};

/// Runs ranks as threads that find each other through a store, as processes do.
void run_over_store(const World& world, const std::function<void(Communicator)>& program,
                    std::chrono::milliseconds limit) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  // run_ranks() of the threads transport starts the threads, and makes the failure of one rank known to the others.
  run_ranks(world.ranks,
            [&](const Communicator& outer) {
              InitOptions options{.transport = world.transport, .start_limit = limit, .operation_limit = limit};
              if (!world.host_of.empty()) options.host = "host " + std::to_string(world.host_of[static_cast<size_t>(outer.rank())]);
              const auto inner = init(store, outer.rank(), world.ranks, options);
              try {
                program(inner);
              } catch (const std::exception& error) {
                inner.abort(error.what());
                throw;
              }
            },
            {.limit = limit});
}

}  // namespace

std::vector<World> all_worlds() {
  auto worlds = talking_worlds();
  worlds.push_back({.transport = "self", .ranks = 1});
  for (const int ranks : kRanks) worlds.push_back({.transport = "fake", .ranks = ranks});
  for (const auto* transport : {"threads", "shm", "gloo"}) worlds.push_back({.transport = transport, .ranks = 1});
  return worlds;
}

std::vector<World> talking_worlds() {
  std::vector<World> worlds;
  for (const auto* transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : kRanks) {
      if (ranks > 1) worlds.push_back({.transport = transport, .ranks = ranks});
    }
  }
  worlds.push_back({.transport = "threads", .ranks = 4, .host_of = {0, 1, 0, 1}});
  worlds.push_back({.transport = "threads", .ranks = 7, .host_of = {0, 1, 1, 2, 2, 2, 2}});
  worlds.push_back({.transport = "gloo", .ranks = 4, .host_of = {0, 0, 0, 1}});
  worlds.push_back({.transport = "gloo", .ranks = 5, .host_of = {0, 0, 1, 2, 2}});
  return worlds;
}

void run_world(const World& world, const std::function<void(Communicator)>& program, std::chrono::milliseconds limit) {
  if (world.transport == "threads" && !world.host_of.empty()) {
    return run_ranks(world.ranks, program, {.limit = limit, .host_of = world.host_of});
  }
  const auto& engine = engine_named(world.transport);
  engine.run != nullptr ? engine.run(world.ranks, program, limit) : run_over_store(world, program, limit);
}

}  // namespace tessera::testing
