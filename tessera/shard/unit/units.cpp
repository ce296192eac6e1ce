#include "tessera/shard/unit/units.h"

#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/sweep.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

using torch::nn::Module;

/// What is known about the module at an address. A new module may have the address of an earlier module.
struct Known {
  std::weak_ptr<const Module> module;  // empty if no shared_ptr owns it
  Boundary boundary;
  std::vector<std::weak_ptr<Unit>> units;  // the units that were made of the module

  bool is_of(const Module& other) const { return module.lock().get() == &other; }
  bool is_over() const {
    return module.expired() && std::ranges::all_of(units, [](const auto& unit) { return unit.expired(); });
  }
};

struct KnownModules {
  std::mutex mutex;
  std::map<const Module*, Known> known;
  Sweep sweep;
};

KnownModules& known_modules() {
  static KnownModules instance;
  return instance;
}

std::atomic<bool> some_checkpointed = false;  // whether any module of this process was ever given to checkpoint_module

void change(const Module& module, c10::function_ref<void(Known&)> change) {
  auto& [mutex, all, sweep] = known_modules();
  const std::lock_guard lock(mutex);
  sweep(all, [](const auto& entry) { return entry.second.is_over(); });
  auto& known = all[&module];
  if (!known.is_of(module)) {
    known.module = module.weak_from_this();
    known.boundary = {};
  }
  change(known);
}

/// Calls `act` with the entry of a module's address, if there is one.
void look(const Module& module, c10::function_ref<void(const Known&)> act) {
  auto& [mutex, all, sweep] = known_modules();
  const std::lock_guard lock(mutex);
  if (const auto found = all.find(&module); found != all.end()) act(found->second);
}

void need_call(const Module& segment, Unit& unit) {
  NeededCall call{.modules = {&segment},
                  .name = class_name(segment),
                  .option = "activation checkpointing",
                  .other_way = " run the Sequential that calls it by activation::checkpoint_sequential,",
                  .with_graph_only = true};
  for (const auto& tensor : segment.parameters()) {
    const auto found = locate(tensor);
    if (found.unit.get() != &unit) continue;
    for (const auto& parameter : found.group->parameters) {
      if (found.group->flat || &parameter == found.parameter) call.parameters.push_back(&parameter);
    }
  }
  if (!call.parameters.empty()) unit.needed_calls().push_back(call);
}

void need_calls_of_segments(const Module& module, Unit& unit) {
  if (boundary_of(module).checkpointing) need_call(module, unit);
  for (const auto& child : module.children()) need_calls_of_segments(*child, unit);
}

[[noreturn]] void refuse_unsharded(const Module& module, std::string_view what) {
  throw UsageError("{}: module {} is not sharded", what, class_name(module));
}

}  // namespace

std::vector<std::shared_ptr<Unit>> units(const Module& module) {
  std::vector<std::shared_ptr<Unit>> result;
  std::unordered_set<const Unit*> known;
  for (const auto& entry : module.parameters()) {
    auto unit = is_paged(entry) ? unit_of(entry) : nullptr;
    if (unit && known.insert(unit.get()).second) result.push_back(std::move(unit));
  }
  return result;
}

// An earlier module may have had this address, and a graph may keep its unit alive. Such a unit is left out, because the new module has
// none of its parameters.
std::vector<std::shared_ptr<Unit>> units_of(const Module& module) {
  std::vector<std::shared_ptr<Unit>> result;
  look(module, [&](const Known& known) {
    for (const auto& each : known.units) {
      if (auto unit = each.lock()) result.push_back(std::move(unit));
    }
  });
  if (!result.empty()) {
    const auto here = units(module);
    std::erase_if(result, [&](const auto& unit) { return std::ranges::find(here, unit) == here.end(); });
  }
  return result;
}

std::shared_ptr<Unit> unit_for(const Module& module, std::string_view what) {
  if (const auto own = units_of(module); !own.empty()) return own.front();
  if (boundary_of(module).is_sharded) return nullptr;
  const auto all = units(module);
  if (all.empty()) refuse_unsharded(module, what);
  throw UsageError("{}: no unit was made from module {} itself; its parameters belong to unit '{}'; call it for the module of that unit",
                   what, class_name(module), all.front()->name());
}

std::vector<std::shared_ptr<Unit>> units_for(const Module& module, Recurse recurse, std::string_view what) {
  if (recurse == Recurse::No) {
    auto own = unit_for(module, what);
    return own ? std::vector{std::move(own)} : std::vector<std::shared_ptr<Unit>>();
  }
  auto all = units(module);
  if (all.empty()) refuse_unsharded(module, what);
  return all;
}

Boundary boundary_of(const Module& module) {
  Boundary result;
  look(module, [&](const Known& known) {
    if (known.is_of(module)) result = known.boundary;
  });
  return result;
}

void remember_unit(const Module& module, Unit& unit) {
  change(module, [&](Known& known) { known.units.push_back(unit.weak_from_this()); });
  if (some_checkpointed) need_calls_of_segments(module, unit);
}

void remember_sharded(const Module& module, const ShardOptions& options, const std::shared_ptr<Unit>& unit) {
  const auto& precision = options.mixed_precision;
  const bool has_units = !units(module).empty();
  change(module, [&](Known& known) {
    auto& boundary = known.boundary;
    boundary.is_sharded = true;
    boundary.has_units = has_units;
    boundary.unit = unit;
    boundary.input_dtype = precision.cast_forward_inputs.value_or(true) ? compute_dtype_of(options) : std::nullopt;
    boundary.output_dtype = precision.output_dtype;
  });
}

void remember_segment(const Module& module, const activation::Options& options) {
  some_checkpointed = true;
  const bool is_new = !boundary_of(module).checkpointing;
  change(module, [&](Known& known) { known.boundary.checkpointing = std::make_shared<const activation::Options>(options); });
  if (!is_new) return;
  for (const auto& unit : units(module)) need_calls_of_segments(module, *unit);
}

std::string class_name(const Module& module) {
  auto name = module.name();
  if (const auto colon = name.rfind(':'); colon != std::string::npos) name.erase(0, colon + 1);
  if (name.ends_with("Impl")) name.erase(name.size() - 4);
  return name;
}

void expect_classes(const std::vector<std::string>& wanted, const std::set<std::string>& of_model) {
  for (const auto& name : wanted) {
    if (of_model.contains(name)) continue;
    throw UsageError("the model has no module of the class {}, which the policy names; it has {}", name, joined(of_model));
  }
}

std::string path_below(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

}  // namespace tessera
