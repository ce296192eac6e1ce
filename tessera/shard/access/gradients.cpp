#include "tessera/shard/access/gradients.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/unit_state.h"

namespace tessera {

bool is_ignored(std::span<const std::shared_ptr<Unit>> units, const at::Tensor& parameter) {
  return std::ranges::any_of(units, [&](const auto& unit) {
    return std::ranges::any_of(unit->ignored(), [&](const at::Tensor& known) { return known.is_same(parameter); });
  });
}

void refuse_not_averaged(const std::string& which) {
  throw UsageError(fmt::format(
      "parameter {} is trainable, but in no unit, so its gradients would not be averaged over the ranks; shard the whole module "
      "last, freeze the parameter, or name it in ShardOptions::ignored",
      which));
}

void expect_averaged(std::span<const at::Tensor> parameters) {
  const auto trains_outside = [](const at::Tensor& parameter) {
    return parameter.defined() && !is_paged(parameter) && parameter.requires_grad();
  };
  if (std::ranges::none_of(parameters, trains_outside)) return;  // by far the most frequent case
  std::vector<std::shared_ptr<Unit>> owners;
  for (const auto& parameter : parameters) {
    auto unit = locate(parameter).unit;
    if (unit && (owners.empty() || owners.back() != unit)) owners.push_back(std::move(unit));
  }
  if (owners.empty()) return;
  for (const auto& parameter : parameters) {
    if (!trains_outside(parameter) || is_ignored(owners, parameter)) continue;
    refuse_not_averaged(fmt::format("of shape [{}], given together with shards,", fmt::join(parameter.sizes(), ", ")));
  }
}

void expect_synced(Unit& unit) {
  const auto held = unit.schedule()->lock();
  unit.state(held).reduction.expect_synced();
}

void drop_unsynced(Unit& unit, const at::Tensor& shard) {
  const auto held = unit.schedule()->lock();
  auto& unsynced = unit.state(held).reduction.unsynced;
  if (unsynced.empty()) return;
  for (const auto* parameter : unit.parameters_in(shard)) unsynced.drop(*parameter, tag_of(shard)->group);
}

uint64_t recoveries_of(std::span<const at::Tensor> parameters) {
  uint64_t sum = 0;
  const Unit* last = nullptr;
  for (const auto& parameter : parameters) {
    const auto unit = locate(parameter).unit;
    if (unit && unit.get() != last) sum += unit->recoveries();
    last = unit.get();
  }
  return sum;
}

void expect_max_norm(double max_norm) {
  if (!(max_norm >= 0)) throw UsageError(fmt::format("gradients can't be clipped to a norm of {}; give a number from 0 on", max_norm));
}

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  return at::clamp(max_norm / (norm + 1e-6), 0.0, 1.0);
}

}  // namespace tessera
