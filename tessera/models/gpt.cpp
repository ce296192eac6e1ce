#include "tessera/models/gpt.h"

#include <ATen/ATen.h>

#include "tessera/nn/linear.h"

namespace tessera::models {

GptImpl::GptImpl(const GptOptions& options)
    : tokens(register_module("tokens", torch::nn::Embedding(options.vocabulary, options.width))),
      positions(register_module("positions", torch::nn::Embedding(options.longest, options.width))),
      norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))),
      head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(options.width, options.vocabulary).bias(false)))) {
  for (int64_t i = 0; i < options.layers; i++) blocks->push_back(GptBlock(options.width, options.heads));
  register_module("blocks", blocks);
}

at::Tensor GptImpl::forward(const at::Tensor& ids) {
  auto x = tokens(ids) + positions(at::arange(ids.size(1), ids.options()));
  for (const auto& block : *blocks) x = call(block->as<GptBlock>(), x);
  return nn::linear(head, norm(x));
}

}  // namespace tessera::models
