#include "tessera/shard/access/gradients.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/fingerprint.h"
#include "tessera/shard/unit/ignored_parameters.h"
#include "tessera/shard/unit/tables.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {

namespace {

std::string hash_of(const at::Tensor& tensor) {
  const auto dense = tensor.is_sparse() ? tensor.detach().to_dense() : tensor.detach();
  return fmt::format("#{:x}", fingerprint(dense.contiguous().view({-1})));
}

bool trains_outside(const at::Tensor& parameter) {
  return parameter.defined() && !is_paged(parameter) && parameter.requires_grad();
}

/// Whether the module has a trainable parameter that is in no unit and has a gradient.
bool has_own_gradients(const torch::nn::Module& module) {
  const auto has_gradient = [](const auto& entry) { return trains_outside(entry.value()) && entry.value().grad().defined(); };
  return std::ranges::any_of(table_of(module), has_gradient) ||
         std::ranges::any_of(children_of(module), [](const auto& entry) { return has_own_gradients(*entry.value()); });
}

}  // namespace

bool is_ignored(const at::Tensor& parameter) {
  return find_ignored(parameter).has_value();
}

void refuse_not_averaged(const std::string& which, std::string_view advice) {
  throw UsageError("parameter {} is trainable, but in no unit, so its gradients would not be averaged over the ranks; {}", which, advice);
}

void expect_averaged(std::span<const at::Tensor> parameters) {
  if (std::ranges::none_of(parameters, trains_outside)) return;  // by far the most frequent case
  if (std::ranges::none_of(parameters, [](const at::Tensor& parameter) { return locate(parameter).unit != nullptr; })) return;
  for (const auto& parameter : parameters) {
    if (!trains_outside(parameter) || is_ignored(parameter)) continue;
    refuse_not_averaged(fmt::format("of shape [{}], given together with shards,", fmt::join(parameter.sizes(), ", ")));
  }
}

void expect_ignored_alike(std::span<const at::Tensor> parameters) {
  c10::SmallVector<Communicator, 1> worlds;
  c10::SmallVector<std::string, 1> lines;  // one text for each of `worlds`
  std::vector<at::Tensor> with_gradient;
  for (const auto& parameter : parameters) {
    if (is_paged(parameter) || !parameter.requires_grad()) continue;
    const auto ignored = find_ignored(parameter);
    const auto model = ignored ? ignored->model.lock() : nullptr;
    if (!model || ignored->averaged) continue;
    const auto place = find_or_add(worlds, model->world());
    if (place == lines.size()) lines.emplace_back();
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) {
      lines[place] += fmt::format("'{}'\tno gradient\n", ignored->name);
      continue;
    }
    lines[place] += fmt::format("'{}'\tvalues {}, gradient {}\n", ignored->name, hash_of(parameter), hash_of(gradient));
    // Zeros are the same on all ranks even if the program does not average, so they prove nothing.
    if (gradient.count_nonzero().item<int64_t>() > 0) with_gradient.push_back(parameter);
  }
  for (size_t i = 0; i < worlds.size(); i++) {
    if (!worlds[i].traits().can_differ()) continue;
    const auto different = difference_on_ranks(worlds[i], lines[i], {.unit = "ignored parameters"});
    if (different.empty()) continue;
    throw DisagreementError(
        "the ranks have different values or gradients of a parameter in ShardOptions::ignored. Give all ranks the same values, "
        "and call tessera::average_gradients(parameters, world) after backward, because nobody else averages these gradients; "
        "or name it in ShardOptions::replicated. {}",
        different);
  }
  for (const auto& parameter : with_gradient) note_averaged(parameter);
}

void expect_averaged(Schedule& schedule) {
  for (const auto& known : schedule.watched_once()) {
    const auto module = known.lock();
    if (!module || !has_own_gradients(*module)) continue;
    for (const auto& item : module->named_parameters()) {
      if (!trains_outside(item.value()) || !item.value().grad().defined() || is_ignored(item.value())) continue;
      refuse_not_averaged(fmt::format("'{}', which was not there when {} was sharded,", item.key(), class_name(*module)),
                          "register it before fully_shard, freeze it, or train it outside of the model");
    }
  }
}

void expect_synced(Unit& unit) {
  LockedState(unit)->reduction.expect_synced();
}

void drop_unsynced(Unit& unit, const at::Tensor& shard) {
  const LockedState state(unit);
  auto& unsynced = state->reduction.unsynced;
  if (!unsynced.may_exist()) return;
  for (const auto* parameter : unit.parameters_in(shard)) unsynced.drop(*parameter, tag_of(shard)->group);
}

void expect_gradients(std::span<const at::Tensor> parameters) {
  if (std::ranges::any_of(parameters, [](const at::Tensor& parameter) { return parameter.grad().defined(); })) return;
  const auto trained = std::ranges::find_if(parameters, [](const at::Tensor& parameter) { return parameter.requires_grad(); });
  if (trained == parameters.end()) return;
  const auto unit = locate(*trained).unit;
  const bool is_waited_for = unit && unit->schedule()->reduces_in_order() && unit->mesh().world().size() > 1;
  throw UsageError(
      "a step without gradients: no parameter of the optimizer has one, so nothing would change; call backward() before step() and "
      "zero_grad() "
      "after it, or skip_step() to leave a step out{}",
      is_waited_for
          ? fmt::format(". With UnusedParameters::Zeros the other ranks wait in vain for this rank's backward pass through the model "
                        "with unit '{}': call backward() for 0 * loss of some batch, or leave the batch out on all ranks",
                        unit->name())
          : std::string());
}

uint64_t recoveries_of(std::span<const at::Tensor> parameters) {
  uint64_t sum = 0;
  const Unit* last = nullptr;
  for (const auto& parameter : parameters) {
    const auto unit = locate(parameter).unit;
    if (unit && unit.get() != last) sum += unit->flags().recoveries;
    last = unit.get();
  }
  return sum;
}

void set_gradient_sink(Unit& unit, const std::shared_ptr<GradientSink>& sink) {
  const LockedState state(unit);
  auto& reduction = state->reduction;
  if (const auto other = reduction.sink(); other && other != sink) {
    throw UsageError(
        "unit '{}': another optimizer steps in backward already; give one optimizer all parameters of the unit, "
        "in groups, or shard them as units of their own",
        unit.name());
  }
  reduction.set_sink(sink);
}

bool end_step(Unit& unit) {
  return LockedState(unit)->reduction.end_step();
}

void expect_gradient_kept(Unit& unit, const at::Tensor& shard, std::string_view what) {
  const LockedState state(unit);
  const auto sink = state->reduction.sink();
  if (!sink || !sink->takes(shard)) return;
  throw UsageError("{}: the optimizer of unit '{}' steps in backward, which leaves no gradients; call its step_after_backward() first",
                   what, unit.name());
}

void expect_max_norm(double max_norm) {
  if (!(max_norm >= 0)) throw UsageError("gradients can't be clipped to a norm of {}; give a number of at least 0", max_norm);
}

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  return at::clamp(max_norm / (norm + 1e-6), 0.0, 1.0);
}

}  // namespace tessera
