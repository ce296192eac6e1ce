#include "tessera/models/densenet.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/pooling.h>

#include "tessera/models/convolution.h"

namespace tessera::models {
namespace {

constexpr int64_t kBottleneck = 4;  // channels between the two convolutions of a layer, per channel that it adds

}  // namespace

DenseLayerImpl::DenseLayerImpl(int64_t in, int64_t growth)
    : norm1(register_module("norm1", torch::nn::BatchNorm2d(in))),
      conv1(register_module("conv1", padded_convolution(in, kBottleneck * growth, 1))),
      norm2(register_module("norm2", torch::nn::BatchNorm2d(kBottleneck * growth))),
      conv2(register_module("conv2", padded_convolution(kBottleneck * growth, growth, 3))) {}

at::Tensor DenseLayerImpl::forward(const at::Tensor& x) {
  return conv2(at::relu(norm2(conv1(at::relu(norm1(x))))));
}

DenseBlockImpl::DenseBlockImpl(int64_t in, int64_t growth, int64_t layers) {
  for (int64_t i = 0; i < layers; i++) register_module("denselayer" + std::to_string(i + 1), DenseLayer(in + i * growth, growth));
}

at::Tensor DenseBlockImpl::forward(at::Tensor x) {
  // Each layer extends what the one before it had, so that in backward it adds one gradient and not one per layer before it.
  for (const auto& layer : children()) x = at::cat({x, call(layer->as<DenseLayer>(), x)}, 1);
  return x;
}

DenseTransitionImpl::DenseTransitionImpl(int64_t in)
    : norm(register_module("norm", torch::nn::BatchNorm2d(in))), conv(register_module("conv", padded_convolution(in, in / 2, 1))) {}

at::Tensor DenseTransitionImpl::forward(const at::Tensor& x) {
  // Means may be taken before a convolution of single pixels or after it, which would have four times as many of them.
  return conv(at::avg_pool2d(at::relu(norm(x)), 2, 2));
}

DenseNetImpl::DenseNetImpl(const DenseNetOptions& options) : features(register_module("features", torch::nn::Sequential())) {
  features->push_back("conv0", padded_convolution(3, options.stem, 7, 2));
  features->push_back("norm0", torch::nn::BatchNorm2d(options.stem));
  features->push_back("relu0", torch::nn::ReLU());
  features->push_back("pool0", torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2).padding(1)));
  auto channels = options.stem;
  for (size_t i = 0; i < options.layers.size(); i++) {
    if (i > 0) {
      features->push_back("transition" + std::to_string(i), DenseTransition(channels));
      channels /= 2;
    }
    features->push_back("denseblock" + std::to_string(i + 1), DenseBlock(channels, options.growth, options.layers[i]));
    channels += options.growth * options.layers[i];
  }
  features->push_back("norm5", torch::nn::BatchNorm2d(channels));
  classifier = register_module("classifier", torch::nn::Linear(channels, options.classes));
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* const convolution = module->as<torch::nn::Conv2d>()) torch::nn::init::kaiming_normal_(convolution->weight);
  }
  torch::nn::init::zeros_(classifier->bias);
}

at::Tensor DenseNetImpl::forward(const at::Tensor& images) {
  return classifier(at::relu(features(images)).mean({2, 3}));
}

std::vector<std::pair<std::string, std::string>> DenseNetImpl::renames() {
  return {{"(denselayer\\d+\\.(?:norm|conv))\\.([12]\\.)", "$1$2"}};
}

}  // namespace tessera::models
