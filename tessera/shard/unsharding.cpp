#include "tessera/shard/unsharding.h"

#include <torch/nn/module.h>

#include "tessera/base/error.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

using torch::nn::Module;

using Prefetch = std::vector<std::weak_ptr<Unit>> UnitSettings::*;

void set_prefetch(const Module& of, std::span<const std::shared_ptr<Module>> modules, Prefetch prefetch, std::string_view what) {
  const auto unit = unit_for(of, what);
  if (!unit) return;
  std::vector<std::weak_ptr<Unit>> result;
  for (const auto& module : modules) {
    if (!module) throw UsageError("{} was given an empty shared_ptr in its list", what);
    const auto next = unit_for(*module, what);
    if (!next) continue;
    if (next->schedule() != unit->schedule()) {
      throw UsageError("{}: units '{}' and '{}' are of different models; first shard the module that contains both", what, unit->name(), next->name());
    }
    result.push_back(next);
  }
  (*LockedState(*unit)).settings.*prefetch = std::move(result);
}

}  // namespace

void UnshardHandle::wait() const {
  if (unit_) unit_->schedule()->wait_for(*unit_);
}

UnshardHandle unshard(ModuleRef module) {
  auto unit = unit_for(module, "unshard");
  if (unit) unit->schedule()->prefetch(*unit);
  return UnshardHandle(std::move(unit));
}

void reshard(ModuleRef module) {
  const auto unit = unit_for(module, "reshard");
  if (!unit) return;
  if (unit->schedule()->reduces_in_order()) {
    throw UsageError(
        "reshard: with UnusedParameters::Zeros, ranks may use different units in backward, so unit '{}' stays unsharded from "
        "forward on; remove the call",
        unit->name());
  }
  unit->schedule()->expect_writable(*unit);
  unit->schedule()->reshard(*unit);
}

void reshard_all(ModuleRef module) {
  expect_idle("reshard_all");
  for (const auto& unit : units(*module)) unit->schedule()->reshard_all();
}

void set_reshard_after_forward(ModuleRef module, ReshardAfterForward rule, Recurse recurse) {
  expect_idle("set_reshard_after_forward");
  for (const auto& unit : units_for(module, recurse, "set_reshard_after_forward")) {
    const bool is_whole_anyway = unit->name().ends_with(kReplicated);
    if (is_whole_anyway) continue;
    const LockedState state(*unit);
    if (state->is_partly_resharded()) unit->schedule()->reshard(*unit);
    state->set_reshard_after_forward(rule);
  }
}

void set_reshard_after_backward(ModuleRef module, ReshardAfterBackward rule, Recurse recurse) {
  expect_idle("set_reshard_after_backward");
  for (const auto& unit : units_for(module, recurse, "set_reshard_after_backward")) {
    LockedState(*unit)->settings.reshard_after_backward = rule == ReshardAfterBackward::Yes;
  }
}

void set_modules_to_forward_prefetch(ModuleRef module, std::span<const std::shared_ptr<Module>> modules) {
  set_prefetch(module, modules, &UnitSettings::forward_prefetch, "set_modules_to_forward_prefetch");
}

void set_modules_to_backward_prefetch(ModuleRef module, std::span<const std::shared_ptr<Module>> modules) {
  set_prefetch(module, modules, &UnitSettings::backward_prefetch, "set_modules_to_backward_prefetch");
}

}  // namespace tessera
