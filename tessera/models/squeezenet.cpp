#include "tessera/models/squeezenet.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/pooling.h>

#include <algorithm>

namespace tessera::models {
namespace {

using torch::nn::Conv2d, torch::nn::Conv2dOptions;

constexpr int64_t kFires = 8;

}  // namespace

FireImpl::FireImpl(int64_t in, int64_t squeezed, int64_t width)
    : squeeze(register_module("squeeze", Conv2d(Conv2dOptions(in, squeezed, 1)))),
      expand1x1(register_module("expand1x1", Conv2d(Conv2dOptions(squeezed, width, 1)))),
      expand3x3(register_module("expand3x3", Conv2d(Conv2dOptions(squeezed, width, 3).padding(1)))) {}

at::Tensor FireImpl::forward(const at::Tensor& x) {
  const auto y = at::relu(squeeze(x));
  return at::relu(at::cat({expand1x1(y), expand3x3(y)}, 1));
}

SqueezeNetImpl::SqueezeNetImpl(const SqueezeNetOptions& options) {
  features->push_back(Conv2d(Conv2dOptions(3, options.width, options.size).stride(2)));
  features->push_back(torch::nn::ReLU());
  auto in = options.width;
  for (int64_t fire = 0; fire < kFires; fire++) {
    if (std::ranges::find(options.pools, fire) != options.pools.end()) {
      features->push_back(torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2).ceil_mode(true)));
    }
    const auto pair = 1 + fire / 2;  // fires are alike in pairs
    features->push_back(Fire(in, 16 * pair, 64 * pair));
    in = 2 * 64 * pair;
  }
  register_module("features", features);
  const Conv2d last(Conv2dOptions(in, options.classes, 1));
  classifier = register_module("classifier", torch::nn::Sequential(torch::nn::Dropout(options.dropout), last, torch::nn::ReLU()));
  for (const auto& each : modules(false)) {
    auto* layer = each->as<Conv2d>();
    if (layer == nullptr) continue;
    if (each == last.ptr()) {
      torch::nn::init::normal_(layer->weight, 0, 0.01);
    } else {
      torch::nn::init::kaiming_uniform_(layer->weight);
    }
    torch::nn::init::zeros_(layer->bias);
  }
}

at::Tensor SqueezeNetImpl::forward(const at::Tensor& images) {
  return classifier(features(images)).mean({2, 3});
}

}  // namespace tessera::models
