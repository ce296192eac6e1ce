// A model of one's own: blocks whose values pass a gate. It knows nothing of sharding but `tessera::call`, by which blocks are called.
#pragma once

#include <tessera/tessera.h>
#include <torch/torch.h>

namespace own {

struct GatedMlpOptions {
  int64_t width = 64;
  int64_t layers = 4;
  int64_t classes = 10;
};

struct GatedBlockImpl : torch::nn::Module {
  explicit GatedBlockImpl(int64_t width)
      : value(register_module("value", torch::nn::Linear(width, width))), gate(register_module("gate", torch::nn::Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + value(x) * torch::sigmoid(gate(x)); }

  torch::nn::Linear value, gate;
};
TORCH_MODULE(GatedBlock);

struct GatedMlpImpl : torch::nn::Module {
  explicit GatedMlpImpl(const GatedMlpOptions& options = {})
      : head(register_module("head", torch::nn::Linear(options.width, options.classes))) {
    for (int64_t i = 0; i < options.layers; i++) blocks->push_back(GatedBlock(options.width));
    register_module("blocks", blocks);
  }

  /// Takes {batch, width} and returns scores {batch, classes}.
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = tessera::call(block->as<GatedBlock>(), x);
    return tessera::call(head, x);
  }

  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(GatedMlp);

}  // namespace own
