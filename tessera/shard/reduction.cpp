#include "tessera/shard/reduction.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/shard/access/phases.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/unit_node.h"
#include "tessera/shard/unit/unit_state.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

using torch::nn::Module;

/// Changes the rules of the units to which a setting applies.
template <class Change>
void change_rules(const Module& module, Recurse recurse, std::string_view what, const Change& change) {
  expect_idle(what);
  for (const auto& unit : units_for(module, recurse, what)) {
    const auto held = unit->schedule()->lock();
    change(unit->state(held).rules);
  }
}

/// The functions that register_gradient_hook was given for one shard.
struct GradientHooks final : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& shard) override {
    for (const auto& hook : hooks) hook(shard);
  }
  std::vector<std::function<void(const at::Tensor&)>> hooks;
};

}  // namespace

NoSync::~NoSync() {
  for (const auto& [unit, required] : before_) {
    const auto held = unit->schedule()->lock();
    unit->state(held).rules.gradient_sync = required;
  }
}

NoSync no_sync(const Module& model) {
  NoSync result;
  expect_idle("no_sync");
  const auto all = units_for(model, Recurse::Yes, "no_sync");
  for (const auto& unit : all) {
    const auto held = unit->schedule()->lock();
    const auto* const root = unit->schedule()->root();
    if (root != nullptr && std::ranges::none_of(all, [&](const auto& other) { return other.get() == root; })) {
      throw UsageError(
          fmt::format("no_sync: unit '{}' is a part of the model '{}', and a backward pass goes through all of it; call no_sync for the "
                      "model, or set_requires_gradient_sync for this part",
                      unit->name(), root->name()));
    }
  }
  for (const auto& unit : all) {
    const auto held = unit->schedule()->lock();
    result.before_.emplace_back(unit, std::exchange(unit->state(held).rules.gradient_sync, false));
  }
  return result;
}

void set_requires_gradient_sync(const Module& module, bool required, Recurse recurse) {
  change_rules(module, recurse, "set_requires_gradient_sync", [&](UnitRules& rules) { rules.gradient_sync = required; });
}

void set_requires_all_reduce(const Module& module, bool required, Recurse recurse) {
  constexpr auto kWhat = "set_requires_all_reduce";
  const auto has_hook = [](const auto& unit) {
    const auto held = unit->schedule()->lock();
    return static_cast<bool>(unit->state(held).rules.reduction_hook);
  };
  for (const auto& unit : units_for(module, recurse, kWhat)) {
    if (required || !has_hook(unit)) continue;
    throw UsageError(fmt::format("{}: unit '{}' has a reduction hook, which decides itself what is reduced", kWhat, unit->name()));
  }
  change_rules(module, recurse, kWhat, [&](UnitRules& rules) { rules.all_reduce = required; });
}

void sync_gradients(const Module& model) {
  expect_idle("sync_gradients");
  const c10::AutoGradMode no_grad(false);
  auto all = units_for(model, Recurse::Yes, "sync_gradients");
  std::ranges::sort(all, {}, &Unit::number);
  for (const auto& unit : all) {
    const auto held = unit->schedule()->lock();
    auto& state = unit->state(held);
    if (state.reduction.unsynced.empty()) continue;
    const UnitRules before = state.rules;
    state.rules.all_reduce = true;
    reduce_unsynced(unit, held);
    state.rules.all_reduce = before.all_reduce;
  }
}

DivideFactors default_divide_factors(int ranks) {
  int pre = 1;
  while (ranks % pre == 0 && ranks / pre > pre) pre *= 2;
  return {.pre = static_cast<double>(pre), .post = static_cast<double>(ranks) / pre};
}

void set_gradient_divide_factors(const Module& module, DivideFactors factors, Recurse recurse) {
  constexpr auto kWhat = "set_gradient_divide_factors";
  for (const double factor : {factors.pre, factors.post}) {
    if (!(factor > 0) || !std::isfinite(factor)) throw UsageError(fmt::format("{}: gradients can't be divided by {}", kWhat, factor));
  }
  change_rules(module, recurse, kWhat, [&](UnitRules& rules) { rules.divide = factors; });
}

void set_reduction_hook(const Module& module, ReductionHook hook, Recurse recurse) {
  constexpr auto kWhat = "set_reduction_hook";
  for (const auto& unit : units_for(module, recurse, kWhat)) {
    const auto held = unit->schedule()->lock();
    const auto& rules = unit->state(held).rules;
    if (!hook || (rules.all_reduce && !rules.divide)) continue;
    throw UsageError(fmt::format("{}: unit '{}' has {}, but a reduction hook decides itself what is reduced and divided", kWhat,
                                 unit->name(), rules.divide ? "divide factors" : "all-reduce switched off"));
  }
  change_rules(module, recurse, kWhat, [&](UnitRules& rules) { rules.reduction_hook = hook; });
}

void register_gradient_hook(const at::Tensor& shard, std::function<void(const at::Tensor& shard)> hook) {
  if (!shard.defined() || !shard.is_leaf() || !shard.requires_grad()) {
    throw UsageError("register_gradient_hook takes trained parameters: what tessera::parameters(model) lists");
  }
  auto& known = torch::autograd::impl::post_acc_grad_hooks(shard);
  if (!known) torch::autograd::impl::set_post_acc_grad_hooks(shard, std::make_unique<GradientHooks>());
  auto* const hooks = dynamic_cast<GradientHooks*>(torch::autograd::impl::post_acc_grad_hooks(shard).get());
  if (hooks == nullptr) throw UsageError("register_gradient_hook: this parameter has a post-accumulate hook that is not of Tessera");
  hooks->hooks.push_back(std::move(hook));
}

}  // namespace tessera
