#include "tessera/models/vgg.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

namespace tessera::models {
namespace {

constexpr std::array<int64_t, 5> kVggWidths = {64, 128, 256, 512, 512};
constexpr int64_t kVggFeatures = 7;  // height and width
constexpr int64_t kVggHidden = 4096;

}  // namespace

VggImpl::VggImpl(const VggOptions& options) {
  using torch::nn::Conv2d, torch::nn::Dropout, torch::nn::Linear, torch::nn::ReLU;
  int64_t in = 3;
  for (size_t stage = 0; stage < kVggWidths.size(); stage++) {
    const auto width = kVggWidths.at(stage);
    for (int64_t i = 0; i < options.convolutions.at(stage); i++) {
      features->push_back(Conv2d(torch::nn::Conv2dOptions(in, width, 3).padding(1)));
      if (options.batch_norm) features->push_back(torch::nn::BatchNorm2d(width));
      features->push_back(ReLU());
      in = width;
    }
    features->push_back(torch::nn::MaxPool2d(2));
  }
  register_module("features", features);
  classifier = register_module("classifier", torch::nn::Sequential(Linear(in * kVggFeatures * kVggFeatures, kVggHidden), ReLU(),
                                                                   Dropout(options.dropout), Linear(kVggHidden, kVggHidden), ReLU(),
                                                                   Dropout(options.dropout), Linear(kVggHidden, options.classes)));
  for (const auto& each : modules(false)) {
    if (auto* convolution = each->as<Conv2d>()) {
      torch::nn::init::kaiming_normal_(convolution->weight, 0, torch::kFanOut, torch::kReLU);
      torch::nn::init::zeros_(convolution->bias);
    } else if (auto* linear = each->as<Linear>()) {
      torch::nn::init::normal_(linear->weight, 0, 0.01);
      torch::nn::init::zeros_(linear->bias);
    }
  }
}

at::Tensor VggImpl::forward(const at::Tensor& images) {
  return classifier(at::adaptive_avg_pool2d(features(images), {kVggFeatures, kVggFeatures}).flatten(1));
}

}  // namespace tessera::models
