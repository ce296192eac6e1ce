#include "tessera/comm/engines.h"

#include <algorithm>
#include <ranges>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/c10d/connect.h"
#include "tessera/comm/fake/fake.h"
#include "tessera/comm/gloo/gloo_link.h"
#include "tessera/comm/mpi/mpi.h"
#include "tessera/comm/mpi/mpi_library.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/shm/shm_link.h"
#include "tessera/comm/threads/run_ranks.h"

namespace tessera {
namespace {

std::vector<Engine>& table() {
  // To add an engine, add a folder for it and a row here.
  static auto& rows = *new std::vector<Engine>{
      Engine{.name = "self",
             .ranks = "a lone process",
             .reach = Engine::Reach::OneRank,
             .automatic = true,
             .run = [](int, const auto& program, auto limit) { program(self_world().with_limit(limit)); }},
      Engine{.name = "threads",
             .ranks = "threads of one process",
             .run = [](int ranks, const auto& program, auto limit) { run_ranks(ranks, program, {.limit = limit}); }},
      Engine{.name = "shm",
             .ranks = "processes of this host",
             .reach = Engine::Reach::OneHost,
             .automatic = true,
             .why_not = why_no_shm,
             .connect = connect_shm},
      Engine{.name = "gloo",
             .ranks = "processes of this host",
             .two_levels = true,
             .automatic = true,
             .why_not = why_no_gloo,
             .connect = connect_gloo},
      Engine{.name = "gloo_collectives", .ranks = "processes of this host", .why_not = why_no_gloo, .connect = connect_gloo_collectives},
      Engine{
          .name = "mpi", .ranks = "processes that mpirun has started", .two_levels = true, .why_not = why_no_mpi, .connect = connect_mpi},
      Engine{.name = "nccl",
             .ranks = "processes of this host, each with a GPU",
             .device = c10::kCUDA,
             .automatic = true,
             .why_not = why_no_nccl,
             .connect = connect_nccl},
      Engine{.name = "fake",
             .ranks = "simulated",
             .run = [](int ranks, const auto& program, auto limit) { program(fake_world(ranks - 1, ranks).with_limit(limit)); }},
  };
  return rows;
}

}  // namespace

std::span<const Engine> engines() {
  return table();
}

AddedEngine::AddedEngine(const Engine& engine) {
  table().push_back(engine);
}

const Engine& engine_named(std::string_view name) {
  const auto found = std::ranges::find(engines(), name, &Engine::name);
  if (found != engines().end()) return *found;
  throw UsageError("no transport is called '{}'; there are {}", name, joined(engines() | std::views::transform(&Engine::name)));
}

}  // namespace tessera
