#include "tessera/testing/transports.h"

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/fake/fake.h"
#include "tessera/comm/init.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/threads/run_ranks.h"

namespace tessera::testing {
namespace {

constexpr int kRanks[] = {1, 2, 3, 4, 7};

/// Runs ranks as threads that find each other through a store, as processes do.
void run_over_store(const World& world, TransportKind kind, const std::function<void(Communicator)>& program,
                    std::chrono::milliseconds limit) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  // run_ranks() of the threads transport starts the threads, and makes the failure of one known to the others.
  run_ranks(world.ranks,
            [&](const Communicator& outer) {
              const auto inner =
                  init(store, outer.rank(), world.ranks, {.transport = kind, .start_limit = limit, .operation_limit = limit});
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
  if (world.transport == "self") return program(self_world().with_limit(limit));
  if (world.transport == "fake") return program(fake_world(world.ranks - 1, world.ranks).with_limit(limit));
  if (world.transport == "threads") return run_ranks(world.ranks, program, {.limit = limit});
  if (world.transport == "shm") return run_over_store(world, TransportKind::Shm, program, limit);
  if (world.transport == "gloo") return run_over_store(world, TransportKind::Gloo, program, limit);
  throw UsageError("no transport is called " + world.transport);
}

}  // namespace tessera::testing
