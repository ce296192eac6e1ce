// ResNet-50: stages of 3, 4, 6 and 3 bottlenecks. A bottleneck has its stride in the 3x3 convolution.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "tessera/shard/call.h"

namespace tessera::models {

struct BottleneckImpl : torch::nn::Module {
  BottleneckImpl(int64_t in, int64_t width, int64_t stride);
  at::Tensor forward(const at::Tensor& x);

  Called<torch::nn::Conv2d> conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  Called<torch::nn::BatchNorm2d> bn1{nullptr}, bn2{nullptr}, bn3{nullptr};
  Called<torch::nn::Sequential> shortcut{nullptr};  // null unless the shape changes
};
TORCH_MODULE(Bottleneck);

struct ResNet50Impl : torch::nn::Module {
  explicit ResNet50Impl(int64_t classes = 1000);

  /// Takes images {n, 3, height, width} and returns scores {n, classes}.
  at::Tensor forward(const at::Tensor& images);

  Called<torch::nn::Conv2d> conv1{nullptr};
  Called<torch::nn::BatchNorm2d> bn1{nullptr};
  torch::nn::ModuleList blocks;
  Called<torch::nn::Linear> fc{nullptr};
};
TORCH_MODULE(ResNet50);

}  // namespace tessera::models
