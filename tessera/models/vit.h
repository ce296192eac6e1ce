// A vision transformer: an image is cut into patches, which an encoder reads like words; the scores are computed from an extra token before
// the patches.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>

#include "tessera/nn/attention.h"

namespace tessera::models {

struct VitOptions {
  int64_t image = 224;  // height and width
  int64_t patch = 16;   // height and width; must divide the image's height and width
  int64_t channels = 3;
  int64_t width = 768;
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t classes = 1000;

  /// Return shapes with 10 and 60 billion parameters.
  static VitOptions of_10b() { return {.patch = 14, .width = 5120, .layers = 32, .heads = 32}; }
  static VitOptions of_60b() { return {.patch = 14, .width = 10240, .layers = 48, .heads = 32}; }
};

struct VitBlockImpl : nn::PreNormLayer {
  VitBlockImpl(int64_t width, int64_t heads);
};
TORCH_MODULE(VitBlock);

struct VitImpl : torch::nn::Module {
  explicit VitImpl(const VitOptions& options = {});

  /// Takes images {batch, channels, height, width} and returns scores {batch, classes}.
  at::Tensor forward(const at::Tensor& images);

  Called<torch::nn::Conv2d> patches{nullptr};
  at::Tensor token, positions;  // {1, 1, width} and {1, 1 + patches, width}
  torch::nn::ModuleList blocks;
  Called<torch::nn::LayerNorm> norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Vit);

}  // namespace tessera::models
