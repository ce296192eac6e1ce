#include "tessera/shard/norms.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/shard/access/gradients.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/weight_forms.h"

namespace tessera {
namespace {

/// The sum of |g|^p over a gradient, or its largest |g| for infinite p, in at least float32.
at::Tensor partial_norm(const at::Tensor& gradient, double p) {
  const auto dtype = at::promoteTypes(gradient.scalar_type(), at::kFloat);
  if (gradient.numel() == 0) return at::zeros({}, gradient.options().dtype(dtype));
  const auto norm = at::linalg_vector_norm(gradient, p, std::nullopt, /*keepdim=*/false, dtype);
  return std::isinf(p) ? norm : norm.pow(p);
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, double p) {
  if (!a.defined()) return b;
  return std::isinf(p) ? at::maximum(a, b) : a + b;
}

/// This rank's part of a norm: over the parameters whose parts one group of ranks adds up, or over all parameters in no unit.
struct PartialSum {
  at::TensorOptions options = {};
  at::Tensor sum = {};  // combined results of partial_norm()
  double squares = 0;   // sums of squares that are known as numbers
};

std::shared_ptr<Unit> unit_of_shard(const at::Tensor& shard) {
  auto unit = unit_of(shard);
  if (!unit || tag_of(shard)->role != Role::Sharded) {
    throw UsageError(
        "the norm of gradients was asked for an unsharded parameter of a sharded model (from a ParameterList?), or for a shard of a model that "
        "no longer exists; pass tessera::parameters(model)");
  }
  return unit;
}

/// Whether the parameter belongs to a unit. A paged parameter may also be the weight of an adapted layer in a model that is not sharded.
bool is_in_unit(const at::Tensor& parameter) {
  return is_paged(parameter) && (tag_of(parameter) != nullptr || !has_stand_in(parameter));
}

/// The storage tag of a gradient if the reduction has computed the sum of squares of its storage, else null.
const StorageTag* tag_of_gradient(const at::Tensor& gradient) {
  const auto* tag = is_paged(gradient) ? tag_of(gradient) : nullptr;
  return tag != nullptr && tag->role == Role::Gradient && tag->squares ? tag : nullptr;
}

/// Returns the number n for which the first n parameters have exactly the gradients whose sum of squares a reduction has computed. Returns
/// 0 if there is no such sum, if some of these gradients are missing, or if there are other gradients between them.
size_t with_known_squares(std::span<const at::Tensor> parameters) {
  const auto* const tag = tag_of_gradient(parameters.front().grad());
  if (tag == nullptr) return 0;
  uint64_t members = 0;
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto& gradient = parameters[i].grad();
    if (gradient.defined() && tag_of_gradient(gradient) != tag) break;
    if (gradient.defined()) members += place_hash(gradient);
    if (members == tag->members) return i + 1;
  }
  return 0;
}

/// Refuses gradients that are not means, and waits for the reductions of all units of the shards. `squares` makes later reductions compute
/// sums of squares.
void finish_reductions(std::span<const at::Tensor> parameters, bool squares) {
  expect_averaged(parameters);
  for (const auto& parameter : parameters) {
    if (!is_in_unit(parameter)) continue;
    const auto unit = unit_of_shard(parameter);
    expect_gradient_kept(*unit, parameter, "the norm of the gradients");
    unit->schedule()->finish_reductions();
    const LockedState state(*unit);
    state->reduction.expect_synced();
    if (squares) state->reduction.compute_squares();
  }
}

/// Returns the parameters without duplicates: model->parameters() lists a tied parameter under each of its names. If there are
/// duplicates, `kept` holds the result.
std::span<const at::Tensor> distinct(std::span<const at::Tensor> parameters, std::vector<at::Tensor>& kept) {
  c10::SmallVector<const c10::TensorImpl*, 256> known;
  for (const auto& parameter : parameters) known.push_back(parameter.unsafeGetTensorImpl());
  std::ranges::sort(known);
  if (std::ranges::adjacent_find(known) == known.end()) return parameters;
  for (const auto& parameter : parameters) {
    if (std::ranges::none_of(kept, [&](const at::Tensor& other) { return other.is_same(parameter); })) kept.push_back(parameter);
  }
  return kept;
}

bool is_finite(const at::Tensor& gradient) {
  if (gradient.numel() == 0) return true;
  return std::isfinite(at::linalg_vector_norm(gradient, std::numeric_limits<double>::infinity()).item<double>());
}

/// Logs the names of the parameters whose gradients have inf or NaN in this rank's part. Does so only a few times, because a GradScaler
/// makes such gradients on purpose.
void say_what_is_not_finite(std::span<const at::Tensor> parameters, const at::Tensor& norm) {
  constexpr int kMostTimes = 3;
  static std::atomic<int> said = 0;
  if (!norm.is_cpu() || std::isfinite(norm.item<double>()) || said >= kMostTimes) return;
  std::vector<std::string> names;
  for (const auto& parameter : parameters) {
    if (!parameter.grad().defined() || is_finite(parameter.grad())) continue;
    const auto found = locate(parameter);
    names.push_back(found.parameter != nullptr ? found.parameter->name : "a parameter in no unit");
  }
  if (names.empty()) return;
  said++;
  log(LogLevel::Warning,
      "the norm of the gradients is {}, because the gradients of {} have inf or NaN in this rank's part; "
      "TESSERA_DETECT_ANOMALY=1 names the rank on which they arise",
      norm.item<double>(), some_of(names));
}

}  // namespace

at::Tensor grad_norm(std::span<const at::Tensor> listed, const NormOptions& options) {
  const Calling calling("tessera::grad_norm");
  std::vector<at::Tensor> kept;
  const auto parameters = distinct(listed, kept);
  const auto p = options.p;
  expect_idle("the norm of gradients");
  if (!(p > 0)) throw UsageError("there is no norm with p = {}; p must be positive, or infinity", p);
  const BelowPaging below;
  expect_ignored_alike(parameters);
  finish_reductions(parameters, p == 2);
  // The norms of shards are added up over their shard group, which has one copy of each value. If the model is divided (some units are on
  // only a part of the ranks), they are added up over all ranks of the model, and only the first replica of each value counts. Parameters
  // in no unit have the same gradients on all ranks and count once.
  PartialSum outside, replica;
  c10::SmallVector<Communicator, 2> groups;
  c10::SmallVector<PartialSum, 2> sums;  // the partial sum of each of `groups`
  const auto sum_with = [&](const at::Tensor& parameter) -> PartialSum& {
    if (!is_in_unit(parameter)) return outside;
    const auto unit = unit_of_shard(parameter);
    const auto& model = *unit->schedule();
    const auto place = find_or_add(groups, model.is_divided() ? model.world() : unit->mesh().shard());
    const bool wide = model.is_divided() || parameter.scalar_type() == at::kDouble;
    if (place == sums.size()) sums.push_back({.options = parameter.options().dtype(wide ? at::kDouble : at::kFloat)});
    return model.is_divided() && !unit->mesh().replicate().is_first() ? replica : sums[place];
  };
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto& gradient = parameters[i].grad();
    auto& partial = sum_with(parameters[i]);
    if (const auto known = p == 2 ? with_known_squares(parameters.subspan(i)) : 0; known > 0) {
      partial.squares += *tag_of(gradient)->squares;
      i += known - 1;
    } else if (p == 2 && &partial != &outside && gradient.defined() && gradient.is_cpu() && !gradient.is_complex()) {
      // Squares are added in double, as in reductions, so that the norm does not depend on whether a reduction has computed them.
      const auto norm = gradient.numel() == 0 ? 0 : at::linalg_vector_norm(gradient, 2, std::nullopt, false, at::kDouble).item<double>();
      partial.squares += norm * norm;
    } else if (gradient.defined()) {
      partial.sum = combine(partial.sum, partial_norm(gradient, p), p);
    }
  }
  auto all = outside.sum;
  for (size_t i = 0; i < sums.size(); i++) {
    const auto& partial = sums[i];
    auto total = partial.sum.defined() ? partial.sum.contiguous() : at::zeros({}, partial.options);
    if (partial.options.dtype() == at::kDouble) total = total.to(at::kDouble);  // ranks may have parameters of different dtypes
    if (partial.squares != 0) total.add_(partial.squares);
    const auto sent = total.to(groups[i].traits().device);
    groups[i].all_reduce(sent, {.op = std::isinf(p) ? Reduce::Max : Reduce::Sum}, {.unit = "gradient norm"}).wait();
    all = combine(all, sent.to(total.device()), p);
  }
  if (!all.defined()) return at::zeros({}, at::kFloat);
  const auto norm = std::isinf(p) ? all : all.pow(1 / p);
  say_what_is_not_finite(parameters, norm);
  return norm;
}

bool gradients_are_finite(std::span<const at::Tensor> listed) {
  const Calling calling("tessera::gradients_are_finite");
  expect_idle("gradients_are_finite");
  std::vector<at::Tensor> kept;
  const auto parameters = distinct(listed, kept);
  const BelowPaging below;
  expect_ignored_alike(parameters);
  finish_reductions(parameters, true);
  c10::SmallVector<Communicator, 2> worlds;
  bool finite = true;
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto& gradient = parameters[i].grad();
    if (is_in_unit(parameters[i])) find_or_add(worlds, unit_of_shard(parameters[i])->schedule()->world());
    if (!gradient.defined() || !finite) continue;
    const auto known = with_known_squares(parameters.subspan(i));
    if (known > 0 && std::isfinite(*tag_of(gradient)->squares)) {
      i += known - 1;
    } else {
      finite = is_finite(gradient);  // also checked here if the sum of squares has overflowed
    }
  }
  for (const auto& world : worlds) {
    const auto found = at::full({}, finite ? 0 : 1, at::TensorOptions(world.traits().device).dtype(at::kFloat));
    world.all_reduce(found, {.op = Reduce::Max}, {.unit = "inf or NaN"}).wait();
    finite = finite && found.item<float>() == 0;
  }
  return finite;
}

at::Tensor clip_grad_norm(std::span<const at::Tensor> listed, double max_norm, const NormOptions& options) {
  const Calling calling("tessera::clip_grad_norm");
  expect_max_norm(max_norm);
  std::vector<at::Tensor> kept;
  const auto parameters = distinct(listed, kept);
  const auto norm = grad_norm(parameters, options);
  const BelowPaging below;
  const auto scale = clip_factor(norm, max_norm);
  for (const auto& parameter : parameters) {
    auto gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (at::isReducedFloatingType(gradient.scalar_type())) {
      gradient.copy_(gradient.to(at::kFloat).mul_(scale.to(gradient.device())));  // the factor may be too small for the gradient's dtype
    } else {
      gradient.mul_(scale.to(gradient.device(), gradient.scalar_type()));
    }
  }
  return norm;
}

/// Sends nothing of its own, so ranks need not all call it, and an error about ranks must not name this call (Calling).
void clip_grad_value(std::span<const at::Tensor> parameters, double clip_value) {
  expect_idle("clip_grad_value");
  if (!(clip_value >= 0)) throw UsageError("clip_grad_value: {} is not a bound; give a number of at least 0", clip_value);
  const BelowPaging below;
  finish_reductions(parameters, /*squares=*/false);
  for (const auto& parameter : parameters) {
    auto gradient = parameter.grad();
    if (gradient.defined()) gradient.clamp_(-clip_value, clip_value);
  }
}

}  // namespace tessera
