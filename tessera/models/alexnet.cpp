#include "tessera/models/alexnet.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

namespace tessera::models {
namespace {

constexpr int64_t kAlexFeatures = 6;  // height and width
constexpr int64_t kAlexHidden = 4096;

struct AlexConvolution {
  int64_t out, size, stride, padding;
  bool pooled;
};
constexpr AlexConvolution kAlexConvolutions[] = {
    {64, 11, 4, 2, true}, {192, 5, 1, 2, true}, {384, 3, 1, 1, false}, {256, 3, 1, 1, false}, {256, 3, 1, 1, true}};

}  // namespace

AlexNetImpl::AlexNetImpl(const AlexNetOptions& options) {
  using torch::nn::Dropout, torch::nn::Linear, torch::nn::ReLU;
  int64_t in = 3;
  for (const auto& [out, size, stride, padding, pooled] : kAlexConvolutions) {
    features->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(padding)));
    features->push_back(ReLU());
    if (pooled) features->push_back(torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2)));
    in = out;
  }
  register_module("features", features);
  // Arguments of a function may be made in any order, but these draw their weights.
  const Linear first(in * kAlexFeatures * kAlexFeatures, kAlexHidden), second(kAlexHidden, kAlexHidden), last(kAlexHidden, options.classes);
  classifier = register_module(
      "classifier", torch::nn::Sequential(Dropout(options.dropout), first, ReLU(), Dropout(options.dropout), second, ReLU(), last));
}

at::Tensor AlexNetImpl::forward(const at::Tensor& images) {
  return classifier(at::adaptive_avg_pool2d(features(images), {kAlexFeatures, kAlexFeatures}).flatten(1));
}

}  // namespace tessera::models
