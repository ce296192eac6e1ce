#include "tessera/shard/reduction.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/calling.h"
#include "tessera/shard/access/gradients.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/backward/unit_node.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

using torch::nn::Module;

/// Changes the states of the units to which a setting applies.
template <class Change>
void change_states(const Module& module, Recurse recurse, std::string_view what, const Change& change) {
  expect_idle(what);
  for (const auto& unit : units_for(module, recurse, what)) change(*LockedState(*unit));
}

/// Throws UsageError if a setting of a unit contradicts the call: `conflict` describes that setting, or returns an empty text.
template <class Conflict>
void expect_no_conflict(const Module& module, Recurse recurse, std::string_view what, const Conflict& conflict) {
  for (const auto& unit : units_for(module, recurse, what)) {
    const std::string_view found = conflict(LockedState(*unit)->settings);
    if (!found.empty()) throw UsageError("{}: unit '{}' has {}", what, unit->name(), found);
  }
}

/// Returns 1 for each unit that has gradients to be reduced, else 0. With UnusedParameters::Zeros, returns 1 for all units if any rank has
/// such gradients in any unit.
std::vector<int64_t> wanted_by_some_rank(const Module& model, const std::vector<std::shared_ptr<Unit>>& all) {
  std::vector<int64_t> wanted;
  bool may_differ = false;
  for (const auto& unit : all) {
    wanted.push_back(LockedState(*unit)->reduction.unsynced.empty() ? 0 : 1);
    may_differ = may_differ || unit->schedule()->reduces_in_order();
  }
  if (!may_differ) return wanted;
  const auto most = world_of(model)->extremes(static_cast<uint64_t>(std::ranges::max(wanted)), {.unit = "sync_gradients"}).most;
  std::ranges::fill(wanted, static_cast<int64_t>(most));
  return wanted;
}

/// Throws UsageError if unsynced gradients wait for a reduction, because a new setting must not apply to a sum that has begun.
void expect_none_waiting(const Module& module, Recurse recurse, std::string_view what) {
  for (const auto& unit : units_for(module, recurse, what)) expect_synced(*unit);
}

/// The functions that were passed to register_gradient_hook for one shard.
struct GradientHooks final : torch::autograd::PostAccumulateGradHook {
  /// Calls the hooks if the shard has a new gradient. Autograd also calls this for shards that got no gradient in this pass.
  void operator()(const at::Tensor& shard) override {
    const auto& gradient = shard.grad();
    if (!gradient.defined()) return;
    const bool is_seen = seen_.lock() == gradient.getIntrusivePtr() && version_ == gradient._version();
    if (is_seen) return;
    for (const auto& hook : std::vector(hooks)) hook(shard);  // a copy, because a hook may register another one
    if (!shard.grad().defined()) return;
    seen_ = shard.grad().getIntrusivePtr();
    version_ = shard.grad()._version();
  }
  std::vector<std::function<void(const at::Tensor&)>> hooks;

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> seen_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  int64_t version_ = 0;
};

}  // namespace

NoSync::~NoSync() {
  for (const auto& unit : units_) {
    const LockedState state(*unit);
    state->settings.no_sync--;
    state->reduction.unsynced.expect();
  }
}

NoSync no_sync(ModuleRef model) {
  expect_idle("no_sync");
  NoSync result;
  auto all = units_for(model, Recurse::Yes, "no_sync");
  for (const auto& unit : all) {
    const auto held = unit->schedule()->lock();
    if (const auto* const other = unit->schedule()->member_outside(all)) {
      throw UsageError(
          "no_sync: module {} is only a part of its model, to which unit '{}' belongs as well, and a backward pass runs through "
          "the whole model; call no_sync for the model, or set_requires_gradient_sync for this part",
          class_name(model), other->name());
    }
  }
  for (const auto& unit : all) LockedState(*unit)->settings.no_sync++;
  result.units_ = std::move(all);
  return result;
}

void set_requires_gradient_sync(ModuleRef module, Required required, Recurse recurse) {
  change_states(module, recurse, "set_requires_gradient_sync", [&](UnitState& state) {
    const bool required_before = std::exchange(state.settings.gradient_sync, required == Required::Yes);
    if (!required_before) state.reduction.unsynced.expect();
  });
}

void set_requires_all_reduce(ModuleRef module, Required required, Recurse recurse) {
  constexpr auto kWhat = "set_requires_all_reduce";
  expect_no_conflict(module, recurse, kWhat, [&](const UnitSettings& settings) {
    return required == Required::No && settings.reduction_hook ? "a reduction hook, which alone decides what is reduced; remove the hook first" : "";
  });
  change_states(module, recurse, kWhat, [&](UnitState& state) { state.settings.all_reduce = required == Required::Yes; });
}

void sync_gradients(ModuleRef model) {
  const Calling calling("tessera::sync_gradients");
  expect_idle("sync_gradients");
  const c10::AutoGradMode no_grad(false);
  auto all = units_for(model, Recurse::Yes, "sync_gradients");
  std::ranges::sort(all, {}, &Unit::number);
  const auto is_wanted = wanted_by_some_rank(model, all);
  for (size_t i = 0; i < all.size(); i++) {
    if (!is_wanted[i]) continue;
    const LockedState state(*all[i]);
    auto& all_reduce = state->settings.all_reduce;
    const auto restore = c10::make_scope_exit([&, before = std::exchange(all_reduce, true)] { all_reduce = before; });
    reduce_unsynced(*all[i]);
  }
}

DivideFactors default_divide_factors(int ranks) {
  int pre = 1;
  while (ranks % pre == 0 && ranks / pre > pre) pre *= 2;
  return {.pre = static_cast<double>(pre), .post = static_cast<double>(ranks) / pre};
}

void average_gradients(std::span<const at::Tensor> parameters, const Communicator& world) {
  const Calling calling("tessera::average_gradients");
  expect_idle("average_gradients");
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> own;
  std::vector<int64_t> has;
  for (const auto& parameter : parameters) {
    if (!parameter.defined() || is_paged(parameter) || !parameter.requires_grad()) continue;
    own.push_back(parameter);
    has.push_back(parameter.grad().defined() ? 1 : 0);
  }
  if (own.empty() || world.size() == 1) return;
  const auto any = at::tensor(has, at::TensorOptions(world.traits().device).dtype(at::kLong));
  world.all_reduce(any, {.op = Reduce::Max}, {.unit = "average_gradients"}).wait();
  const auto on_host = any.cpu();
  std::vector<Work> sums;
  for (size_t i = 0; i < own.size(); i++) {
    if (on_host[static_cast<int64_t>(i)].item<int64_t>() == 0) continue;
    auto& gradient = own[i].mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(own[i]);
    if (gradient.is_sparse()) gradient = gradient.to_dense();
    if (!gradient.is_contiguous()) gradient = gradient.contiguous();
    sums.push_back(world.all_reduce(gradient, {.op = Reduce::Mean}, {.unit = "average_gradients"}));
  }
  for (auto& sum : sums) sum.wait();
}

void set_gradient_divide_factors(ModuleRef module, DivideFactors factors, Recurse recurse) {
  constexpr auto kWhat = "set_gradient_divide_factors";
  for (const double factor : {factors.pre, factors.post}) {
    if (!(factor > 0) || !std::isfinite(factor)) throw UsageError("{}: gradients can't be divided by {}; give a positive number", kWhat, factor);
  }
  expect_none_waiting(module, recurse, kWhat);
  expect_no_conflict(module, recurse, kWhat, [](const UnitSettings& settings) {
    return settings.reduction_hook ? "a reduction hook, which alone decides what gradients are divided by; remove the hook first" : "";
  });
  change_states(module, recurse, kWhat, [&](UnitState& state) { state.settings.divide = factors; });
}

void set_reduction_hook(ModuleRef module, ReductionHook hook, Recurse recurse) {
  constexpr auto kWhat = "set_reduction_hook";
  expect_none_waiting(module, recurse, kWhat);
  expect_no_conflict(module, recurse, kWhat, [&](const UnitSettings& settings) {
    if (hook && settings.divide) return "divide factors, but a reduction hook alone decides what is reduced and divided; use one of them";
    if (hook && !settings.all_reduce) return "all-reduce switched off, but a reduction hook alone decides what is reduced and divided; use one of them";
    return "";
  });
  change_states(module, recurse, kWhat, [&](UnitState& state) { state.settings.reduction_hook = hook; });
}

void register_gradient_hook(const at::Tensor& shard, std::function<void(const at::Tensor& shard)> hook) {
  if (!hook) throw UsageError("register_gradient_hook was given an empty function; give it the hook");
  if (shard.defined() && shard.is_leaf() && !shard.requires_grad()) {
    const auto* const known = locate(shard).parameter;
    throw UsageError("register_gradient_hook: {} is frozen, so it gets no gradient; unfreeze it first",
                     known != nullptr ? "'" + known->name + "'" : "the parameter");
  }
  if (!shard.defined() || !shard.is_leaf()) {
    throw UsageError("register_gradient_hook takes trained parameters; pass one of tessera::parameters(model)");
  }
  auto& known = torch::autograd::impl::post_acc_grad_hooks(shard);
  if (!known) torch::autograd::impl::set_post_acc_grad_hooks(shard, std::make_unique<GradientHooks>());
  auto* const hooks = dynamic_cast<GradientHooks*>(torch::autograd::impl::post_acc_grad_hooks(shard).get());
  if (hooks == nullptr)
    throw UsageError("register_gradient_hook: this parameter has a post-accumulate hook of other code; remove that hook first");
  hooks->hooks.push_back(std::move(hook));
}

}  // namespace tessera
