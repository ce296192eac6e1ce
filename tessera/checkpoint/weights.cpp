#include "tessera/checkpoint/weights.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <optional>
#include <regex>

#include "tessera/base/error.h"
#include "tessera/checkpoint/adapters.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/forward_phase.h"

namespace tessera::checkpoint {
namespace {

/// Turns names in files into names in the model.
class Renames {
 public:
  explicit Renames(const std::vector<std::pair<std::string, std::string>>& pairs) {
    for (const auto& [pattern, replacement] : pairs) {
      try {
        pairs_.emplace_back(std::regex(pattern), replacement);
      } catch (const std::regex_error& error) {
        throw UsageError("'{}' in the option renamed is no regular expression: {}", pattern, error.what());
      }
    }
  }

  std::string operator()(std::string name) const {
    for (const auto& [pattern, replacement] : pairs_) name = std::regex_replace(name, pattern, replacement);
    return name;
  }

 private:
  std::vector<std::pair<std::regex, std::string>> pairs_;
};

Catalog renamed(Catalog catalog, const Renames& renames) {
  decltype(catalog.tensors) tensors;
  for (auto& [name, tensor] : catalog.tensors) {
    if (!tensors.try_emplace(renames(name), std::move(tensor)).second)
      throw UsageError("the option renamed makes '{}' of '{}' and of another tensor", renames(name), name);
  }
  decltype(catalog.aliases) aliases;
  for (const auto& [alias, first] : catalog.aliases) aliases[renames(alias)] = renames(first);
  decltype(catalog.buffers) buffers;
  for (const auto& name : catalog.buffers) buffers.insert(renames(name));
  catalog.tensors = std::move(tensors);
  catalog.aliases = std::move(aliases);
  catalog.buffers = std::move(buffers);
  return catalog;
}

}  // namespace

void load_weights(ModuleRef module, const std::filesystem::path& path, const WeightsOptions& options) {
  const Calling calling("checkpoint::load_weights");
  expect_idle("load_weights");
  const c10::AutoGradMode no_grad(false);
  const auto known = world_of(module);
  const auto world = known ? *known : self_world();
  const auto together = [&](const std::string& failure, c10::function_ref<void()> act) {
    all_or_none(world, {.unit = "weights"}, failure, act);
  };
  LocalValues model;
  std::optional<CatalogReader> stored;
  std::optional<ModelPlan> plan;
  const auto failure = fmt::format("can't load {}; nothing was changed", path.string());
  together(failure, [&] {
    adapters().expect_unmerged(module);
    model = local_values(module);
  });
  const auto elsewhere = names_elsewhere(model, world);
  together(failure, [&] {
    // If names are to be replaced, the model's names say nothing about those in the files.
    const auto known = options.renamed.empty() ? names_of(model, options.may_be_missing) : ModelNames();
    stored.emplace(renamed(read_model(path, known), Renames(options.renamed)));
    std::set<std::string> names;
    for (const auto& [name, tensor] : stored->catalog().tensors) {
      if (!elsewhere.contains(name)) names.insert(name);
    }
    const LoadOptions difference{
        .may_be_missing = options.may_be_missing, .may_be_unknown = options.may_be_unknown, .first_of_tied = options.first_of_tied};
    plan.emplace(*stored, std::move(names), model, difference, path.string());
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
