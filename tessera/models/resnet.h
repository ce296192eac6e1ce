// ResNets of 18 to 152 layers, made of basic blocks or of bottlenecks, which have their stride in the 3 x 3 convolution. The parameters
// have the names of torchvision's.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <vector>

#include "tessera/models/image_model.h"
#include "tessera/shard/call.h"

namespace tessera::models {

struct ResNetOptions {
  std::array<int64_t, 4> blocks = {3, 4, 6, 3};  // of each layer
  bool bottlenecks = true;                       // or basic blocks
  int64_t classes = 1000;

  static ResNetOptions resnet18(int64_t classes = 1000) { return {{2, 2, 2, 2}, false, classes}; }
  static ResNetOptions resnet34(int64_t classes = 1000) { return {{3, 4, 6, 3}, false, classes}; }
  static ResNetOptions resnet50(int64_t classes = 1000) { return {{3, 4, 6, 3}, true, classes}; }
  static ResNetOptions resnet101(int64_t classes = 1000) { return {{3, 4, 23, 3}, true, classes}; }
  static ResNetOptions resnet152(int64_t classes = 1000) { return {{3, 8, 36, 3}, true, classes}; }
};

struct BasicBlockImpl : torch::nn::Module {
  BasicBlockImpl(int64_t in, int64_t width, int64_t stride);
  at::Tensor forward(const at::Tensor& x);

  Called<torch::nn::Conv2d> conv1{nullptr};
  Called<torch::nn::BatchNorm2d> bn1{nullptr};
  Called<torch::nn::Conv2d> conv2{nullptr};
  Called<torch::nn::BatchNorm2d> bn2{nullptr};
  Called<torch::nn::Sequential> downsample{nullptr};  // only if the shape changes
};
TORCH_MODULE(BasicBlock);

/// It returns 4 * width channels.
struct BottleneckImpl : torch::nn::Module {
  BottleneckImpl(int64_t in, int64_t width, int64_t stride);
  at::Tensor forward(const at::Tensor& x);

  Called<torch::nn::Conv2d> conv1{nullptr};
  Called<torch::nn::BatchNorm2d> bn1{nullptr};
  Called<torch::nn::Conv2d> conv2{nullptr};
  Called<torch::nn::BatchNorm2d> bn2{nullptr};
  Called<torch::nn::Conv2d> conv3{nullptr};
  Called<torch::nn::BatchNorm2d> bn3{nullptr};
  Called<torch::nn::Sequential> downsample{nullptr};  // only if the shape changes
};
TORCH_MODULE(Bottleneck);

struct ResNetImpl : ImageModel {
  explicit ResNetImpl(const ResNetOptions& options = {});
  at::Tensor forward(const at::Tensor& images) override;

  Called<torch::nn::Conv2d> conv1{nullptr};
  Called<torch::nn::BatchNorm2d> bn1{nullptr};
  std::array<Called<torch::nn::Sequential>, 4> layers;  // layer1 to layer4
  Called<torch::nn::Linear> fc{nullptr};
};
TORCH_MODULE(ResNet);

}  // namespace tessera::models
