#include "tessera/models/resnet.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include "tessera/models/convolution.h"

namespace tessera::models {
namespace {

using torch::nn::BatchNorm2d, torch::nn::Conv2d;

constexpr int64_t kExpansion = 4;

template <class Block>
void register_downsample(Block& block, int64_t in, int64_t out, int64_t stride) {
  if (stride == 1 && in == out) return;
  block.downsample = block.register_module("downsample", torch::nn::Sequential(padded_convolution(in, out, 1, stride), BatchNorm2d(out)));
}

template <class Block>
at::Tensor residual(const Block& block, const at::Tensor& x, const at::Tensor& y) {
  return at::relu(y + (block.downsample.is_empty() ? x : block.downsample(x)));
}

}  // namespace

BasicBlockImpl::BasicBlockImpl(int64_t in, int64_t width, int64_t stride)
    : conv1(register_module("conv1", padded_convolution(in, width, 3, stride))),
      bn1(register_module("bn1", BatchNorm2d(width))),
      conv2(register_module("conv2", padded_convolution(width, width, 3))),
      bn2(register_module("bn2", BatchNorm2d(width))) {
  register_downsample(*this, in, width, stride);
}

at::Tensor BasicBlockImpl::forward(const at::Tensor& x) {
  return residual(*this, x, bn2(conv2(at::relu(bn1(conv1(x))))));
}

BottleneckImpl::BottleneckImpl(int64_t in, int64_t width, int64_t stride)
    : conv1(register_module("conv1", padded_convolution(in, width, 1))),
      bn1(register_module("bn1", BatchNorm2d(width))),
      conv2(register_module("conv2", padded_convolution(width, width, 3, stride))),
      bn2(register_module("bn2", BatchNorm2d(width))),
      conv3(register_module("conv3", padded_convolution(width, kExpansion * width, 1))),
      bn3(register_module("bn3", BatchNorm2d(kExpansion * width))) {
  register_downsample(*this, in, kExpansion * width, stride);
}

at::Tensor BottleneckImpl::forward(const at::Tensor& x) {
  return residual(*this, x, bn3(conv3(at::relu(bn2(conv2(at::relu(bn1(conv1(x)))))))));
}

ResNetImpl::ResNetImpl(const ResNetOptions& options)
    : conv1(register_module("conv1", padded_convolution(3, 64, 7, 2))), bn1(register_module("bn1", BatchNorm2d(64))) {
  int64_t in = 64;
  for (size_t stage = 0; stage < layers.size(); stage++) {
    const int64_t width = 64 << stage;
    for (int64_t i = 0; i < options.blocks.at(stage); i++) {
      const int64_t stride = i == 0 && stage > 0 ? 2 : 1;
      if (options.bottlenecks) {
        layers.at(stage)->push_back(Bottleneck(in, width, stride));
      } else {
        layers.at(stage)->push_back(BasicBlock(in, width, stride));
      }
      in = options.bottlenecks ? kExpansion * width : width;
    }
    register_module("layer" + std::to_string(stage + 1), layers.at(stage));
  }
  fc = register_module("fc", torch::nn::Linear(in, options.classes));
  for (const auto& each : modules(false)) {
    if (auto* layer = each->as<Conv2d>()) torch::nn::init::kaiming_normal_(layer->weight, 0, torch::kFanOut, torch::kReLU);
  }
}

at::Tensor ResNetImpl::forward(const at::Tensor& images) {
  auto x = at::max_pool2d(at::relu(bn1(conv1(images))), 3, 2, 1);
  for (const auto& layer : layers) x = layer(x);
  return fc(x.mean({2, 3}));
}

}  // namespace tessera::models
