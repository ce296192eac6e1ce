#include "tessera/models/mlp.h"

#include <ATen/ATen.h>

namespace tessera::models {

MlpImpl::MlpImpl(const MlpOptions& options) : head(register_module("head", torch::nn::Linear(options.width, options.classes))) {
  for (int64_t i = 0; i < options.layers; i++) blocks->push_back(torch::nn::Linear(options.width, options.width));
  register_module("blocks", blocks);
}

at::Tensor MlpImpl::forward(at::Tensor x) {
  for (const auto& block : *blocks) x = at::relu(call(block->as<torch::nn::Linear>(), x));
  return head(x);
}

}  // namespace tessera::models
