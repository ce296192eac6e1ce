// SqueezeNet 1.0 and 1.1. The parameters have the names of torchvision's.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>

#include <array>

#include "tessera/models/image_model.h"
#include "tessera/shard/call.h"

namespace tessera::models {

struct SqueezeNetOptions {
  int64_t width = 96, size = 7;              // of the first convolution
  std::array<int64_t, 3> pools = {0, 3, 7};  // the fires before which there is a pooling
  int64_t classes = 1000;
  double dropout = 0.5;

  static SqueezeNetOptions squeezenet1_0() { return {}; }
  static SqueezeNetOptions squeezenet1_1() { return {64, 3, {0, 2, 4}}; }
};

/// It returns 2 * width channels.
struct FireImpl : torch::nn::Module {
  FireImpl(int64_t in, int64_t squeezed, int64_t width);
  at::Tensor forward(const at::Tensor& x);

  Called<torch::nn::Conv2d> squeeze{nullptr}, expand1x1{nullptr}, expand3x3{nullptr};
};
TORCH_MODULE(Fire);

struct SqueezeNetImpl : ImageModel {
  explicit SqueezeNetImpl(const SqueezeNetOptions& options = {});
  at::Tensor forward(const at::Tensor& images) override;

  Called<torch::nn::Sequential> features, classifier;
};
TORCH_MODULE(SqueezeNet);

}  // namespace tessera::models
