#include "tessera/checkpoint/weights.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <optional>

#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/phases.h"
#include "tessera/shard/access/write_guard.h"

namespace tessera::checkpoint {

void load_weights(torch::nn::Module& module, const std::filesystem::path& path, const LoadOptions& options) {
  expect_idle("load_weights");
  const c10::AutoGradMode no_grad(false);
  const auto world = world_of(module).value_or(self_world());
  const auto together = [&](const std::string& failure, c10::function_ref<void()> act) {
    all_or_none(world, {.unit = "weights"}, failure, act);
  };
  LocalValues model;
  std::optional<CatalogReader> stored;
  std::optional<ModelPlan> plan;
  together(fmt::format("can't load {}; nothing was changed", path.string()), [&] {
    model = local_values(module);
    stored.emplace(read_model(path));
    std::set<std::string> names;
    for (const auto& [name, tensor] : stored->catalog().tensors) names.insert(name);
    plan.emplace(*stored, std::move(names), model, options, path.string());
    const auto& topology = world.topology();
    verify_share(*stored, world, topology.ranks_on(topology.host_of(world.local_ranks().front())));  // each host may have its own copy
    expect_writable(model.units);
  });
  together(fmt::format("could not finish loading {}; what is loaded is part of it", path.string()), [&] {
    const WriteGuard guard(model.units, WriteKind::Load);
    plan->load(local_values(module), world);
  });
}

}  // namespace tessera::checkpoint
