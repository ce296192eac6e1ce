#include "tessera/comm/engines.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <ranges>

#include "tessera/base/error.h"
#include "tessera/comm/c10d/connect.h"
#include "tessera/comm/fake/fake.h"
#include "tessera/comm/gloo/gloo_link.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/shm/shm_link.h"
#include "tessera/comm/threads/run_ranks.h"

namespace tessera {
namespace {

// A new engine is a folder, and a row here.
constexpr std::array kEngines = {
    Engine{.name = "self",
           .ranks = "a lone process",
           .reach = Engine::Reach::OneRank,
           .automatic = true,
           .run = [](int, const Engine::Program& program, std::chrono::milliseconds limit) { program(self_world().with_limit(limit)); }},
    Engine{.name = "threads",
           .ranks = "threads of one process",
           .run = [](int ranks, const Engine::Program& program,
                     std::chrono::milliseconds limit) { run_ranks(ranks, program, {.limit = limit}); }},
    Engine{.name = "shm",
           .ranks = "processes of this host",
           .reach = Engine::Reach::OneHost,
           .automatic = true,
           .why_not = why_no_shm,
           .connect = connect_shm},
    Engine{.name = "gloo", .ranks = "processes of this host", .automatic = true, .why_not = why_no_gloo, .connect = connect_gloo},
    Engine{.name = "gloo_collectives", .ranks = "processes of this host", .why_not = why_no_gloo, .connect = connect_gloo_collectives},
    Engine{.name = "nccl", .ranks = "processes of this host, each with a GPU", .why_not = why_no_nccl, .connect = connect_nccl},
    Engine{.name = "fake",
           .ranks = "simulated",
           .run = [](int ranks, const Engine::Program& program,
                     std::chrono::milliseconds limit) { program(fake_world(ranks - 1, ranks).with_limit(limit)); }},
};

}  // namespace

std::span<const Engine> engines() {
  return kEngines;
}

const Engine& engine_named(std::string_view name) {
  const auto* const found = std::ranges::find(kEngines, name, &Engine::name);
  if (found != kEngines.end()) return *found;
  throw UsageError(
      fmt::format("no transport is called '{}'; there are {}", name, fmt::join(kEngines | std::views::transform(&Engine::name), ", ")));
}

}  // namespace tessera
