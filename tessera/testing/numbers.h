// Values by a formula: the same on every rank and in every run, with no generator that the threads of a test would share.
#pragma once

#include <torch/torch.h>

namespace tessera::testing {

inline at::Tensor numbers(at::IntArrayRef sizes, double shift = 0) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).mul(0.7).add(shift).sin().view(sizes);
}

/// Before sharding.
inline void fill_with_numbers(torch::nn::Module& module, double scale = 0.5) {
  const torch::NoGradGuard no_grad;
  int shift = 0;
  for (auto& parameter : module.parameters()) parameter.copy_(numbers(parameter.sizes(), shift++).mul(scale));
}

}  // namespace tessera::testing
