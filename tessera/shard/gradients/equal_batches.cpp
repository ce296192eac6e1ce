// EqualBatches: compares a few values of a rank's own gradients with their mean.
#include "tessera/shard/gradients/gradient_watch.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/log.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

// More passes than a short test or a tutorial takes.
constexpr int kEnough = 20;

/// Some values of a flat tensor, from all over it.
at::Tensor sample(const at::Tensor& flat) {
  constexpr int64_t kValues = 32;
  const auto step = std::max<int64_t>(1, flat.numel() / kValues);
  return flat.slice(0, 0, std::min(flat.numel(), kValues * step), step).to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

void EqualBatches::keep(const Unit& unit, const at::Tensor& gradients) {
  if (!world_.is_first() || !world_.traits().can_differ() || !gradients.is_cpu()) return close();
  if (!same_ranks(unit.mesh().world(), world_)) return;
  seen_[&unit].own = sample(gradients);
}

void EqualBatches::compare(const Unit& unit, const at::Tensor& mean) {
  const auto found = seen_.find(&unit);
  if (found == seen_.end() || !found->second.own.defined()) return;
  auto& seen = found->second;
  const auto own = std::exchange(seen.own, {}), all = sample(mean);
  if (own.sizes() != all.sizes() || !own.any().item<bool>()) return;
  // The sum of equal values may be rounded.
  constexpr double kRounding = 1e-5;
  if (!at::allclose(all, own, kRounding, 0)) return close();
  if (++seen.times < kEnough) return;
  log(LogLevel::Warning,
      fmt::format("all {} ranks have had the same gradients in {} backward passes, so each gets the same batches, and together they learn "
                  "no more than one: give each rank a part of its own, as tessera::data::Sampler does",
                  unit.mesh().world().size(), kEnough));
  close();
}

void EqualBatches::close() {
  is_open_ = false;
  seen_.clear();
}

}  // namespace tessera
