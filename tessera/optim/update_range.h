// From the tensors of an optimizer to the loops over their memory.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <span>

#include "tessera/optim/update_kernels.h"

namespace tessera::optim {

/// Whether all of it is dense host memory of float32, in one order.
inline bool has_loops(const at::Tensor& parameter, const at::Tensor& gradient, std::span<const at::Tensor> state) {
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.strides() == parameter.strides();
  };
  return parameter.is_non_overlapping_and_dense() && fits(parameter) && fits(gradient) && std::ranges::all_of(state, fits);
}

/// In the parameter's order; up to two states.
inline UpdateRange update_range(const at::Tensor& parameter, const at::Tensor& gradient, std::span<const at::Tensor> state,
                          const at::Tensor& cast_copy) {
  // The values change without an operator, which would have told the graphs that have saved them.
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

inline constexpr int64_t kGrain = 1 << 16;  // values: fewer are not worth a thread

/// On all threads that the program gives to operators.
template <class Rule>
void update_in_parallel(const Rule& rule, const UpdateRange& all) {
  at::parallel_for(0, all.count, kGrain, [&](int64_t begin, int64_t end) { update(rule, part_of(all, begin, end - begin)); });
}

/// A factor that is 1 unless there is one.
inline float value_of(const at::Tensor& factor) {
  return factor.defined() ? factor.item<float>() : 1;
}

/// The gradient as operators shall see it.
inline at::Tensor scaled(const at::Tensor& gradient, const at::Tensor& factor) {
  return factor.defined() ? gradient * factor.to(gradient.scalar_type()) : gradient;
}

}  // namespace tessera::optim
