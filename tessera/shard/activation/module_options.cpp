#include "tessera/shard/activation/module_options.h"

#include <torch/nn/module.h>

#include <atomic>
#include <map>
#include <mutex>

#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera::activation {
namespace {

using torch::nn::Module;

struct Known {
  std::weak_ptr<const Module> module;  // a new module may have the address of an earlier one
  std::shared_ptr<const Options> options;
};

struct Modules {
  std::atomic<bool> any = false;
  std::mutex mutex;
  std::map<const Module*, Known> of;
};

Modules& known_modules() {
  static Modules instance;
  return instance;
}

void need_call(const Module& module, const Unit& of_unit) {
  NeededCall call{.modules = {&module},
                  .name = class_name(module),
                  .option = "activation checkpointing",
                  .other_way = " run the Sequential that calls it by activation::checkpoint_sequential,",
                  .with_graph_only = true};
  std::shared_ptr<Unit> unit;
  for (const auto& tensor : module.parameters()) {
    const auto found = locate(tensor);
    if (found.unit.get() != &of_unit || found.parameter == nullptr) continue;
    unit = found.unit;
    if (found.group->flat) {
      for (const auto& parameter : found.group->parameters) call.parameters.push_back(&parameter);
    } else {
      call.parameters.push_back(found.parameter);
    }
  }
  if (unit) unit->needed_calls().push_back(call);
}

}  // namespace

void set_options(const Module& module, const Options& options) {
  auto& known = known_modules();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.of, [](const auto& entry) { return entry.second.module.expired(); });
  known.of[&module] = {.module = module.weak_from_this(), .options = std::make_shared<const Options>(options)};
  known.any = true;
}

std::shared_ptr<const Options> options_of(const Module& module) {
  auto& known = known_modules();
  if (!known.any) return nullptr;
  const std::lock_guard lock(known.mutex);
  const auto found = known.of.find(&module);
  if (found == known.of.end() || found->second.module.lock().get() != &module) return nullptr;
  return found->second.options;
}

void need_calls_of_segments(const Module& module, const Unit& unit) {
  if (!known_modules().any) return;
  if (options_of(module)) need_call(module, unit);
  for (const auto& child : module.children()) need_calls_of_segments(*child, unit);
}

}  // namespace tessera::activation
