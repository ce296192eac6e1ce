#include "tessera/models/resnet50.h"

#include <ATen/ATen.h>

namespace tessera::models {
namespace {

constexpr int64_t kExpansion = 4;

torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t size, int64_t stride = 1) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

}  // namespace

BottleneckImpl::BottleneckImpl(int64_t in, int64_t width, int64_t stride)
    : conv1(register_module("conv1", convolution(in, width, 1))),
      conv2(register_module("conv2", convolution(width, width, 3, stride))),
      conv3(register_module("conv3", convolution(width, kExpansion * width, 1))),
      bn1(register_module("bn1", torch::nn::BatchNorm2d(width))),
      bn2(register_module("bn2", torch::nn::BatchNorm2d(width))),
      bn3(register_module("bn3", torch::nn::BatchNorm2d(kExpansion * width))) {
  if (stride == 1 && in == kExpansion * width) return;
  shortcut = register_module(
      "shortcut", torch::nn::Sequential(convolution(in, kExpansion * width, 1, stride), torch::nn::BatchNorm2d(kExpansion * width)));
}

at::Tensor BottleneckImpl::forward(const at::Tensor& x) {
  const auto y = bn3(conv3(at::relu(bn2(conv2(at::relu(bn1(conv1(x))))))));
  return at::relu(y + (shortcut.is_empty() ? x : shortcut(x)));
}

ResNet50Impl::ResNet50Impl(int64_t classes)
    : conv1(register_module("conv1", convolution(3, 64, 7, 2))), bn1(register_module("bn1", torch::nn::BatchNorm2d(64))) {
  int64_t in = 64, width = 64;
  for (const int64_t count : {3, 4, 6, 3}) {
    for (int64_t i = 0; i < count; i++) {
      blocks->push_back(Bottleneck(in, width, i == 0 && width > 64 ? 2 : 1));
      in = kExpansion * width;
    }
    width *= 2;
  }
  register_module("blocks", blocks);
  fc = register_module("fc", torch::nn::Linear(in, classes));
}

at::Tensor ResNet50Impl::forward(const at::Tensor& images) {
  auto x = at::max_pool2d(at::relu(bn1(conv1(images))), 3, 2, 1);
  for (const auto& block : *blocks) x = call(block->as<Bottleneck>(), x);
  return fc(x.mean({2, 3}));
}

}  // namespace tessera::models
