// A stack of wide linear layers: many parameters and little computation, the hardest case for sharding.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "tessera/shard/call.h"

namespace tessera::models {

struct MlpOptions {
  int64_t width = 2048;
  int64_t layers = 8;
  int64_t classes = 16;
};

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const MlpOptions& options = {});

  /// Takes {batch, width} and returns scores {batch, classes}.
  at::Tensor forward(at::Tensor x);

  torch::nn::ModuleList blocks;
  Called<torch::nn::Linear> head{nullptr};
};
TORCH_MODULE(Mlp);

}  // namespace tessera::models
