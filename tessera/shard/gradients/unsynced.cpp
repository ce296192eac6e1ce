#include "tessera/shard/gradients/unsynced.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera {

at::Tensor UnsyncedGradients::sum_of(const Unit::Parameter& parameter) const {
  if (in_parts_.contains(&parameter)) {
    throw UsageError(
        "what is kept of the gradient of '{}' is a sum over its shard group (set_requires_all_reduce), which is divided among the ranks",
        parameter.name);
  }
  const auto sum = sums_.find(&parameter);
  return sum != sums_.end() ? sum->second.clone() : at::Tensor();
}

void UnsyncedGradients::drop(const Unit::Parameter& parameter, size_t group) {
  dropped_ = true;
  sums_.erase(&parameter);
  if (in_parts_.erase(&parameter) == 0) return;
  if (const auto part = parts_.find(group); part != parts_.end()) parameter.in_chunk(part->second).zero_();
  if (in_parts_.empty()) parts_.clear();
}

void UnsyncedGradients::add(std::span<const Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients) {
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto gradient = gradients[i].defined() && gradients[i].is_sparse() ? gradients[i].to_dense() : gradients[i];
    if (!gradient.defined()) continue;
    auto& sum = sums_[parameters[i]];
    if (sum.defined()) {
      sum.add_(gradient);
    } else {
      // A copy, because autograd may have given the same tensor to others.
      sum = at::empty_strided(parameters[i]->sizes, parameters[i]->strides,
                              gradient.options().dtype(at::promoteTypes(gradient.scalar_type(), at::kFloat)))
                .copy_(gradient);
    }
  }
}

void UnsyncedGradients::add_to(std::span<const Unit::Parameter* const> parameters, std::span<at::Tensor> gradients) {
  expected_ = false;
  for (const auto& [parameter, sum] : sums_) {
    if (std::ranges::find(parameters, parameter) != parameters.end()) continue;
    throw UsageError(
        "'{}' was frozen while its gradient waited for a reduction, which would be lost; call tessera::sync_gradients(model) before "
        "parameters are frozen, or zero_grad() of an optimizer of Tessera to drop it",
        parameter->name);
  }
  for (size_t i = 0; i < parameters.size(); i++) {
    auto& gradient = gradients[i];
    if (const auto known = sums_.find(parameters[i]); known != sums_.end()) {
      auto sum = std::move(known->second);
      if (gradient.defined()) sum.add_(gradient.is_sparse() ? gradient.to_dense() : gradient);
      gradient = std::move(sum);
      sums_.erase(known);
    }
    if (!gradient.defined() && in_parts_.contains(parameters[i])) gradient = zeros_like(*parameters[i], parts_.begin()->second.device());
  }
}

void UnsyncedGradients::add_part(size_t group, const at::Tensor& sum, const std::set<const Unit::Parameter*>& parameters) {
  auto& part = parts_[group];
  part = part.defined() ? part.add_(sum) : sum.to(at::promoteTypes(sum.scalar_type(), at::kFloat), /*non_blocking=*/false, /*copy=*/true);
  in_parts_.insert(parameters.begin(), parameters.end());
}

void UnsyncedGradients::add_part_to(size_t group, const at::Tensor& sum) {
  const auto known = parts_.find(group);
  if (known == parts_.end()) return;
  at::Tensor(sum).add_(known->second);
  parts_.erase(known);
  if (parts_.empty()) in_parts_.clear();
}

at::Tensor zeros_like(const Unit::Parameter& parameter, c10::Device device) {
  return at::zeros({}, at::TensorOptions(parameter.shard.scalar_type()).device(device)).expand(parameter.sizes);
}

}  // namespace tessera
