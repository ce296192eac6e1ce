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
              const auto inner =
                  init(store, outer.rank(), world.ranks, {.transport = world.transport, .start_limit = limit, .operation_limit = limit});
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
  return worlds;
}

void run_world(const World& world, const std::function<void(Communicator)>& program, std::chrono::milliseconds limit) {
  const auto& engine = engine_named(world.transport);
  engine.run != nullptr ? engine.run(world.ranks, program, limit) : run_over_store(world, program, limit);
}

}  // namespace tessera::testing
