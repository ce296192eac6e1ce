// Values from a formula: the same on every rank and in every run, without a random generator that threads would share.
#pragma once

#include <torch/torch.h>

namespace tessera::testing {

inline at::Tensor numbers(at::IntArrayRef sizes, double shift = 0) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).mul(0.7).add(shift).sin().view(sizes);
}

/// Fills the parameters of a module. Call it before sharding.
inline void fill_with_numbers(torch::nn::Module& module, double scale = 0.5) {
  const torch::NoGradGuard no_grad;
  int shift = 0;
  for (auto& parameter : module.parameters()) parameter.copy_(numbers(parameter.sizes(), shift++).mul(scale));
}

}  // namespace tessera::testing
