#include "tessera/shard/full_params.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/access/gradients.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/backward/whole_gradients.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

/// The unit, group and parameter of a shard or of a module's member. Throws UsageError for any other tensor.
Located located(const at::Tensor& parameter) {
  auto found = locate(parameter);
  if (found.parameter == nullptr) {
    throw UsageError("this tensor is not a sharded parameter; pass one of tessera::parameters(model), or the module's own member");
  }
  return found;
}

at::Tensor copied(const at::Tensor& tensor, CopyTo to) {
  return to == CopyTo::Device ? tensor.clone() : tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor copy_of_buffer(const std::string& name, const at::Tensor& buffer, const std::optional<Communicator>& world, BufferSync sync,
                          CopyTo to) {
  if (!world) return copied(buffer.detach(), to);
  const auto copy = synced(name, buffer.to(original_dtype(buffer)), *world, sync);
  return to == CopyTo::Device ? copy : copy.cpu();
}

bool wanted_here(const std::optional<Communicator>& world, Ranks ranks) {
  return ranks == Ranks::All || !world || world->is_first();
}

/// Returns copies of the chosen parameters and buffers, by name, on the ranks that want them.
std::map<std::string, at::Tensor> copies_of(const LocalValues& model, const std::optional<Communicator>& world, Ranks ranks,
                                            BufferSync buffers, CopyTo to, c10::function_ref<bool(const std::string& name)> chosen) {
  const bool wanted = wanted_here(world, ranks);
  std::map<std::string, at::Tensor> result;
  const auto keep = [&](const LocalPart& part, const at::Tensor& whole) {
    if (wanted) result[part.name] = copied(whole, to);
  };
  gather_like(
      model, [&](const LocalPart& part) { return chosen(part.name) ? part.values : at::Tensor(); }, keep);
  for (const auto& [name, tensor] : model.outside) {
    if (chosen(name)) result[name] = copied(tensor, to);
  }
  for (const auto& [name, buffer] : model.buffers) {
    if (chosen(name)) result[name] = copy_of_buffer(name, buffer, world, buffers, to);
  }
  if (!wanted) result.clear();
  return result;
}

/// Gathers the full parameter, or a full tensor of the same layout (such as its gradient). Undefined on ranks that do not want it.
at::Tensor full_tensor(const Located& found, const at::Tensor& own_flat, Ranks ranks) {
  const auto all = LockedState(*found.unit)->gathered(*found.group, own_flat);
  return wanted_here(found.unit->mesh().world(), ranks) ? found.parameter->in(all).clone() : at::Tensor();
}

void report_loss(const Unit& unit, const std::exception& error) {
  log(LogLevel::Error, "changes of the parameters of unit '{}' are lost: {}", unit.name(), error.what());
}

/// Unpins the unit. Reshards it if it shows its stored form and no other guard pins it.
void let_go(Unit& unit) {
  const auto schedule = unit.schedule();
  const auto held = schedule->lock();
  unit.flags().pins--;
  if (!unit.flags().is_pinned() && unit.flags().shows_stored) schedule->reshard(unit);
}

/// Throws UsageError on all ranks if a rank has unsynced gradients. Called before the first unit is gathered, because a gather needs all
/// ranks.
void expect_synced_everywhere(const torch::nn::Module& module, const std::vector<std::shared_ptr<Unit>>& all) {
  const auto world = world_of(module);
  if (!world) return;
  all_or_none(*world, {.unit = "full_params"}, "can't show its gradients", [&] {
    for (const auto& unit : all) expect_synced(*unit);
  });
}

}  // namespace

FullParams full_params(ModuleRef module, Access access, WithGradients gradients) {
  const Calling calling("tessera::full_params");
  expect_idle("full_params");
  auto all = units(module);
  if (gradients == WithGradients::Yes) expect_synced_everywhere(module, all);
  FullParams guard;
  guard.access_ = access;
  for (auto& unit : all) {
    const LockedState state(*unit);
    Unit* const wanted[] = {unit.get()};
    unit->schedule()->use(wanted, {});
    try {
      if (access == Access::Write) state->begin_unsharded_writes();
      if (access == Access::ReadStored) state->show_stored();
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
      gradients_[i]->write_back(/*alone=*/std::uncaught_exceptions() > 0);
    } catch (const std::exception& error) {
      log(LogLevel::Error, "changes of the gradients of unit '{}' are lost: {}", units_[i]->name(), error.what());
      try {
        gradients_[i]->lose(error.what());
      } catch (const std::exception& worse) {
        log(LogLevel::Error, "these lost gradients could not be marked as lost: {}", worse.what());
      }
    }
  }
  gradients_.clear();
  if (access_ != Access::Write) {
    for (const auto& unit : units_) let_go(*unit);
    return;
  }
  std::optional<WriteGuard> guard;  // keeps other threads out until the written values are in the shards
  try {
    guard.emplace(units_, WriteKind::Unsharded);
  } catch (const std::exception& error) {
    for (const auto& unit : units_) report_loss(*unit, error);
  }
  for (const auto& unit : units_) {
    const LockedState state(*unit);
    try {
      if (guard) {
        unit->outdate({});
        state->keep_own_part();
      }
    } catch (const std::exception& error) {
      report_loss(*unit, error);
    }
    state->end_unsharded_writes();
    let_go(*unit);
  }
}

at::Tensor full_grad(const at::Tensor& parameter, Ranks ranks) {
  const Calling calling("tessera::full_grad");
  const auto found = located(parameter);
  if (!found.parameter->shard.grad().defined()) return {};
  const BelowPaging below;
  return full_tensor(found, own_gradients(*found.unit, *found.group), ranks);
}

at::Tensor unsynced_grad(const at::Tensor& parameter) {
  const auto found = located(parameter);
  return LockedState(*found.unit)->reduction.unsynced.sum_of(*found.parameter);
}

at::Tensor full_parameter(const at::Tensor& parameter, Ranks ranks) {
  const Calling calling("tessera::full_parameter");
  const auto found = located(parameter);
  const BelowPaging below;
  expect_shards_current(*found.unit);
  return full_tensor(found, found.group->own, ranks);
}

std::map<std::string, at::Tensor> full_state(ConstModuleRef module, Ranks ranks, BufferSync buffers, CopyTo to, Frozen frozen) {
  const Calling calling("tessera::full_state");
  const BelowPaging below;
  const auto model = local_values(module);
  const auto world = world_of(module);
  if (std::ranges::any_of(model.units, [](const auto& unit) { return unit->schedule()->is_divided(); }))
    expect_all_on_each(model, *world, "a full state");
  const auto chosen = [&](const std::string& name) { return frozen == Frozen::Included || !model.frozen.contains(name); };
  auto result = copies_of(model, world, ranks, buffers, to, chosen);
  if (result.empty()) return result;
  for (const auto& [alias, name] : model.aliases) {
    if (chosen(name)) result[alias] = result.at(name);
  }
  return result;
}

at::Tensor full_tensor(ConstModuleRef module, const std::string& name, Ranks ranks, BufferSync buffers) {
  const Calling calling("tessera::full_tensor");
  const BelowPaging below;
  const auto model = local_values(module, name);
  const auto alias = model.aliases.find(name);
  const auto& own_name = alias == model.aliases.end() ? name : alias->second;
  if (const auto part = std::ranges::find(model.parts, own_name, &LocalPart::name); part != model.parts.end()) {
    expect_shards_current(*part->unit);
    const auto& group = part->unit->groups()[part->group];
    return full_tensor({part->unit, &group, &group.parameters[part->parameter]}, group.own, ranks);
  }
  if (!model.outside.contains(own_name) && !model.buffers.contains(own_name))
    throw UsageError("the module has no parameter and no buffer '{}'; names are as in the model before it was sharded", name);
  const auto is_it = [&](const std::string& each) { return each == own_name; };
  const auto copies = copies_of(model, world_of(module), ranks, buffers, CopyTo::Device, is_it);
  return copies.empty() ? at::Tensor() : copies.begin()->second;
}

}  // namespace tessera
