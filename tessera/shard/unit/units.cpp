#include "tessera/shard/unit/units.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/sweep.h"
#include "tessera/shard/unit/boundary.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

/// The units that were made from each module, used to name units and to refuse sharding a module twice. It owns neither modules nor units.
struct Registry {
  std::mutex mutex;
  std::multimap<const torch::nn::Module*, std::weak_ptr<Unit>> units;
  Sweep sweep;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

void remember_unit(const torch::nn::Module& module, const std::shared_ptr<Unit>& unit) {
  std::lock_guard lock(registry().mutex);
  registry().sweep(registry().units, [](const auto& entry) { return entry.second.expired(); });
  registry().units.emplace(&module, unit);
}

// A new module may have the address of an earlier one whose unit a graph keeps alive. It is told apart because it has none of that unit's
// parameters.
std::vector<std::shared_ptr<Unit>> units_of(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> result;
  {
    std::lock_guard lock(registry().mutex);
    const auto [begin, end] = registry().units.equal_range(&module);
    for (auto entry = begin; entry != end; ++entry) {
      if (auto unit = entry->second.lock()) result.push_back(std::move(unit));
    }
  }
  if (!result.empty()) {
    const auto here = units(module);
    std::erase_if(result, [&](const auto& unit) { return std::ranges::find(here, unit) == here.end(); });
  }
  return result;
}

std::shared_ptr<Unit> unit_for(const torch::nn::Module& module, std::string_view what) {
  if (const auto own = units_of(module); !own.empty()) return own.front();
  if (boundary_of(module)) return nullptr;
  const auto all = units(module);
  if (all.empty()) throw UsageError(fmt::format("{}: module {} is not sharded", what, class_name(module)));
  throw UsageError(fmt::format("{}: no unit was made from module {} itself; its parameters belong to unit '{}'", what, class_name(module),
                               all.front()->name()));
}

std::vector<std::shared_ptr<Unit>> units_for(const torch::nn::Module& module, Recurse recurse, std::string_view what) {
  if (recurse == Recurse::No) {
    auto own = unit_for(module, what);
    return own ? std::vector{std::move(own)} : std::vector<std::shared_ptr<Unit>>();
  }
  auto all = units(module);
  if (all.empty()) throw UsageError(fmt::format("{}: module {} is not sharded", what, class_name(module)));
  return all;
}

std::vector<std::shared_ptr<Unit>> units(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> result;
  std::unordered_set<const Unit*> known;
  for (const auto& entry : module.parameters()) {
    const auto* tag = is_paged(entry) ? tag_of(entry) : nullptr;
    auto unit = tag != nullptr ? tag->unit.lock() : locate(entry).unit;
    if (unit && known.insert(unit.get()).second) result.push_back(std::move(unit));
  }
  return result;
}

std::string class_name(const torch::nn::Module& module) {
  auto name = module.name();
  if (const auto colon = name.rfind(':'); colon != std::string::npos) name.erase(0, colon + 1);
  if (name.ends_with("Impl")) name.erase(name.size() - 4);
  return name;
}

std::string path_below(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

}  // namespace tessera
