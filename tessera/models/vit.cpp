#include "tessera/models/vit.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include "tessera/base/error.h"
#include "tessera/nn/linear.h"

namespace tessera::models {
namespace {

constexpr double kEpsilon = 1e-6;
constexpr double kDeviation = 0.02;  // the standard deviation of initial embeddings

int64_t patches_of(const VitOptions& options) {
  if (options.patch < 1 || options.image < options.patch || options.image % options.patch != 0) {
    throw UsageError("Vit: an image of {0} by {0} can't be cut into patches of {1} by {1}", options.image, options.patch);
  }
  const auto along = options.image / options.patch;
  return along * along;
}

}  // namespace

VitBlockImpl::VitBlockImpl(int64_t width, int64_t heads) : PreNormLayer({.width = width, .heads = heads, .causal = false}, kEpsilon) {}

VitImpl::VitImpl(const VitOptions& options)
    : patches(register_module(
          "patches", torch::nn::Conv2d(torch::nn::Conv2dOptions(options.channels, options.width, options.patch).stride(options.patch)))),
      token(register_parameter("token", at::zeros({1, 1, options.width}))),
      positions(
          register_parameter("positions", torch::nn::init::normal_(at::empty({1, 1 + patches_of(options), options.width}), 0, kDeviation))),
      norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width}).eps(kEpsilon)))),
      head(register_module("head", torch::nn::Linear(options.width, options.classes))) {
  for (int64_t i = 0; i < options.layers; i++) blocks->push_back(VitBlock(options.width, options.heads));
  register_module("blocks", blocks);
}

at::Tensor VitImpl::forward(const at::Tensor& images) {
  const auto words = patches(images).flatten(2).transpose(1, 2);
  auto x = at::cat({token.expand({words.size(0), 1, words.size(2)}), words}, 1) + positions;
  for (const auto& block : *blocks) x = call(block->as<VitBlock>(), x);
  return nn::linear(head, norm(x).select(1, 0));
}

}  // namespace tessera::models
