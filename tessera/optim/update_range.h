// Runs the update loops over the memory of an optimizer's tensors.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <span>

#include "tessera/comm/simulation.h"
#include "tessera/optim/update_kernels.h"

namespace tessera::optim {

/// Whether the update loops can be used: all tensors are dense float32 in host memory, with the same strides.
inline bool has_loops(const at::Tensor& parameter, const at::Tensor& gradient, std::span<const at::Tensor> state) {
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.strides() == parameter.strides();
  };
  return parameter.is_non_overlapping_and_dense() && fits(parameter) && fits(gradient) && std::ranges::all_of(state, fits);
}

/// The memory of the tensors, with up to two state tensors. Bumps the parameter's version.
inline UpdateRange update_range(const at::Tensor& parameter, const at::Tensor& gradient, std::span<const at::Tensor> state,
                                const at::Tensor& cast_copy) {
  // The loops change values without an operator, so autograd would not notice that a saved parameter has changed.
  parameter.unsafeGetTensorImpl()->bump_version();
  return {.parameters = parameter.data_ptr<float>(),
          .gradients = gradient.const_data_ptr<float>(),
          .first = state.empty() ? nullptr : state[0].data_ptr<float>(),
          .second = state.size() < 2 ? nullptr : state[1].data_ptr<float>(),
          .cast_copy = cast_copy.defined() ? static_cast<uint16_t*>(cast_copy.data_ptr()) : nullptr,
          .count = parameter.numel()};
}

inline UpdateRange part_of(const UpdateRange& all, int64_t begin, int64_t count) {
  const auto from = [&](auto* pointer) { return pointer == nullptr ? nullptr : pointer + begin; };
  return {.parameters = from(all.parameters),
          .gradients = from(all.gradients),
          .first = from(all.first),
          .second = from(all.second),
          .cast_copy = from(all.cast_copy),
          .count = count};
}

/// The bytes that an update reads and writes.
inline uint64_t bytes_of(const UpdateRange& all) {
  const auto width = 3 + (all.first != nullptr ? 2 : 0) + (all.second != nullptr ? 2 : 0);
  return static_cast<uint64_t>(all.count) * (sizeof(float) * static_cast<uint64_t>(width) + (all.cast_copy != nullptr ? 2 : 0));
}

inline constexpr int64_t kGrain = 1 << 16;  // the fewest values that are worth a thread

/// Runs the update on libtorch's intra-op threads.
template <class Rule>
void update_in_parallel(const Rule& rule, const UpdateRange& all) {
  if (auto* const simulation = Simulation::current()) return simulation->update(bytes_of(all));
  at::parallel_for(0, all.count, kGrain, [&](int64_t begin, int64_t end) { update(rule, part_of(all, begin, end - begin)); });
}

/// The factor as a number; 1 if it is undefined.
inline float value_of(const at::Tensor& factor) {
  return factor.defined() ? factor.item<float>() : 1;
}

/// Returns gradient * factor, for rules that are made of operators. Multiplies in float32, because the dtype of the gradient may not hold
/// the factor.
inline at::Tensor scaled(const at::Tensor& gradient, const at::Tensor& factor) {
  if (!factor.defined()) return gradient;
  const auto wide = at::promoteTypes(gradient.scalar_type(), at::kFloat);
  return gradient.to(wide).mul(factor).to(gradient.scalar_type());
}

}  // namespace tessera::optim
