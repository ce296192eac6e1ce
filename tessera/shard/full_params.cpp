#include "tessera/shard/full_params.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/access/gradients.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/phases.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/backward/whole_gradients.h"
#include "tessera/shard/schedule/gathered.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/tables.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

/// The unit, group and parameter of a shard or of a module's member. Throws UsageError for any other tensor.
Located located(const at::Tensor& parameter) {
  auto found = locate(parameter);
  if (found.parameter == nullptr) {
    throw UsageError("this tensor is no sharded parameter; pass one of tessera::parameters(model), or the module's own member");
  }
  return found;
}

at::Tensor copied(const at::Tensor& tensor, CopyTo to) {
  return to == CopyTo::Device ? tensor.clone() : tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

/// A parameter or buffer of a module under the name that it has before sharding.
struct Entry {
  std::string name;
  at::Tensor tensor = {};  // undefined if the parameter is sharded
  bool is_buffer = false;
  Located sharded = {};  // set if the parameter is sharded; its unsharded tensor may be gone if no module holds it any more
};

std::vector<Entry> entries_of(const torch::nn::Module& module) {
  std::vector<Entry> result;
  for (const auto& item : module.named_parameters()) {
    const auto found = locate(item.value());
    if (found.parameter == nullptr) {
      result.push_back({.name = item.key(), .tensor = item.value()});
    } else if (!found.group->flat || found.parameter != &*found.group->flat) {
      result.push_back({.name = item.key(), .sharded = found});
    } else {
      // The module lists a flat shard in place of the group's parameters.
      const auto prefix = item.key().substr(0, item.key().size() - found.parameter->local_name.size());
      for (auto& parameter : found.group->parameters) {
        const Located place{found.unit, found.group, &parameter};
        result.push_back({.name = prefix + parameter.local_name, .sharded = place});
        for (const auto& other : parameter.other_names) result.push_back({.name = prefix + other, .sharded = place});
      }
    }
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) result.push_back({.name = item.key(), .tensor = item.value(), .is_buffer = true});
  }
  return result;
}

/// A copy of an entry that is not sharded.
at::Tensor copy_of(const Entry& entry, const std::optional<Communicator>& world, BufferSync buffers, CopyTo to) {
  if (!entry.is_buffer || !world) return copied(entry.tensor.detach(), to);
  const auto copy = synced(entry.name, entry.tensor.to(original_dtype(entry.tensor)), *world, buffers);
  return to == CopyTo::Device ? copy : copy.cpu();
}

/// The values of a group's shards.
const at::Tensor& shards_of(Unit& unit, const Unit::Group& group) {
  expect_shards_current(unit);
  return group.own;
}

bool wanted_here(const std::optional<Communicator>& world, Ranks ranks) {
  return ranks == Ranks::All || !world || world->is_first();
}

/// The full parameter, or a full tensor with its layout, on the ranks that want it.
at::Tensor full_tensor(const Located& found, const at::Tensor& own_flat, Ranks ranks) {
  const auto all = gathered(*found.unit, *found.group, own_flat);
  return wanted_here(found.unit->mesh().world(), ranks) ? unsharded_view(all, *found.parameter).clone() : at::Tensor();
}

void report_loss(const Unit& unit, const std::exception& error) {
  log(LogLevel::Error, fmt::format("changes of the parameters of unit '{}' are lost: {}", unit.name(), error.what()));
}

/// The last guard of a unit that shows its stored form reshards it.
void let_go(Unit& unit) {
  const auto schedule = unit.schedule();
  const auto held = schedule->lock();
  unit.flags().pins--;
  if (!unit.flags().is_pinned() && unit.flags().shows_stored) schedule->evict(unit);
}

/// Throws UsageError on all ranks if a rank has gradients that have not been reduced. Before the first unit is gathered, which needs them
/// all.
void expect_synced_everywhere(const torch::nn::Module& module, const std::vector<std::shared_ptr<Unit>>& all) {
  const auto world = world_of(module);
  if (!world) return;
  all_or_none(*world, {.unit = "full_params"}, "can't show its gradients", [&] {
    for (const auto& unit : all) expect_synced(*unit);
  });
}

}  // namespace

FullParams full_params(const torch::nn::Module& module, Access access, WithGradients gradients) {
  expect_idle("full_params");
  auto all = units(module);
  if (gradients == WithGradients::Yes) expect_synced_everywhere(module, all);
  FullParams guard;
  guard.access_ = access;
  for (auto& unit : all) {
    const auto schedule = unit->schedule();
    const auto held = schedule->lock();
    Unit* const wanted[] = {unit.get()};
    schedule->use(wanted, {});
    auto& state = unit->state(held);
    try {
      if (access == Access::Write) state.begin_unsharded_writes();
      if (access == Access::ReadStored) state.show_stored();
    } catch (...) {
      let_go(*unit);
      throw;
    }
    guard.units_.push_back(std::move(unit));
  }
  for (const auto& unit : guard.units_) {
    if (gradients == WithGradients::Yes) guard.gradients_.push_back(std::make_shared<WholeGradients>(unit));
  }
  return guard;
}

FullParams::~FullParams() {
  for (size_t i = 0; i < gradients_.size() && access_ == Access::Write; i++) {
    try {
      std::uncaught_exceptions() == 0 ? gradients_[i]->write_back() : gradients_[i]->write_back_alone();
    } catch (const std::exception& error) {
      log(LogLevel::Error, fmt::format("changes of the gradients of unit '{}' are lost: {}", units_[i]->name(), error.what()));
      try {
        gradients_[i]->lose(error.what());
      } catch (const std::exception& worse) {
        log(LogLevel::Error, fmt::format("and they could not be marked as lost: {}", worse.what()));
      }
    }
  }
  gradients_.clear();
  if (access_ != Access::Write) {
    for (const auto& unit : units_) let_go(*unit);
    return;
  }
  std::optional<WriteGuard> guard;  // keeps other threads out until the shards have taken over what was written
  try {
    guard.emplace(units_, WriteKind::Unsharded);
  } catch (const std::exception& error) {
    for (const auto& unit : units_) report_loss(*unit, error);
  }
  for (const auto& unit : units_) {
    const auto schedule = unit->schedule();
    const auto held = schedule->lock();
    auto& state = unit->state(held);
    try {
      if (guard) {
        unit->outdate({});
        state.keep_own_part();
      }
    } catch (const std::exception& error) {
      report_loss(*unit, error);
    }
    state.end_unsharded_writes();
    let_go(*unit);
  }
}

at::Tensor full_grad(const at::Tensor& parameter, Ranks ranks) {
  const auto found = located(parameter);
  const auto& listed = found.group->flat ? *found.group->flat : *found.parameter;  // what has the gradient
  if (!listed.shard.grad().defined()) return {};
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  return full_tensor(found, own_gradients(*found.unit, *found.group), ranks);
}

at::Tensor unsynced_grad(const at::Tensor& parameter) {
  const auto found = located(parameter);
  const auto held = found.unit->schedule()->lock();
  return found.unit->state(held).reduction.unsynced.sum_of(*found.parameter);
}

at::Tensor full_parameter(const at::Tensor& parameter, Ranks ranks) {
  const auto found = located(parameter);
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  return full_tensor(found, shards_of(*found.unit, *found.group), ranks);
}

std::map<std::string, at::Tensor> full_state(const torch::nn::Module& module, Ranks ranks, BufferSync buffers, CopyTo to) {
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  const auto all_units = units(module);
  const auto world = world_of(module);
  const bool wanted = wanted_here(world, ranks);
  if (world && std::ranges::any_of(all_units, [](const auto& unit) { return unit->schedule()->is_divided(); }))
    expect_all_on_each(local_values(module), *world, "a full state");
  std::map<const void*, at::Tensor> copies;  // keyed by Unit::Parameter or, for what is not sharded, by tensor
  for (const auto& unit : all_units) {
    for (const auto& group : unit->groups()) {
      const auto all = gathered(*unit, group, shards_of(*unit, group));
      for (const auto& parameter : group.parameters) {
        if (wanted) copies[&parameter] = copied(unsharded_view(all, parameter), to);
      }
    }
  }
  std::map<std::string, at::Tensor> result;
  for (const auto& entry : entries_of(module)) {
    const auto* parameter = entry.sharded.parameter;
    auto& copy = copies[parameter != nullptr ? static_cast<const void*>(parameter) : entry.tensor.unsafeGetTensorImpl()];
    if (parameter == nullptr && !copy.defined()) copy = copy_of(entry, world, buffers, to);
    if (wanted) result[entry.name] = copy;
  }
  return result;
}

at::Tensor full_state(const torch::nn::Module& module, const std::string& name, Ranks ranks, BufferSync buffers) {
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  const auto all = entries_of(module);
  const auto found = std::ranges::find(all, name, &Entry::name);
  if (found == all.end()) {
    throw UsageError(fmt::format("the module has no parameter and no buffer '{}'; names are as in the model before it was sharded", name));
  }
  if (const auto& sharded = found->sharded; sharded.parameter != nullptr)
    return full_tensor(sharded, shards_of(*sharded.unit, *sharded.group), ranks);
  const auto world = world_of(module);
  auto copy = copy_of(*found, world, buffers, CopyTo::Device);
  return wanted_here(world, ranks) ? copy : at::Tensor();
}

}  // namespace tessera
