#include "tessera/models/vit.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include "tessera/base/error.h"
#include "tessera/nn/linear.h"

namespace tessera::models {
namespace {

constexpr double kEpsilon = 1e-6;
// Of weights and embeddings at first, as in timm, which cuts the normal distribution where nothing is left of it.
constexpr double kDeviation = 0.02;

int64_t patches_of(const VitOptions& options) {
  if (options.patch < 1 || options.image < options.patch || options.image % options.patch != 0) {
    throw UsageError("Vit: an image of {0} by {0} can't be cut into patches of {1} by {1}", options.image, options.patch);
  }
  const auto along = options.image / options.patch;
  return along * along;
}

torch::nn::LayerNorm norm_of(const VitOptions& options) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width}).eps(kEpsilon));
}

int64_t hidden_of(const VitOptions& options) {
  return options.hidden > 0 ? options.hidden : 4 * options.width;
}

}  // namespace

VitPatchesImpl::VitPatchesImpl(const VitOptions& options)
    : proj(register_module(
          "proj", torch::nn::Conv2d(torch::nn::Conv2dOptions(options.channels, options.width, options.patch).stride(options.patch)))) {}

at::Tensor VitPatchesImpl::forward(const at::Tensor& images) {
  return proj(images).flatten(2).transpose(1, 2);
}

VitMlpImpl::VitMlpImpl(const VitOptions& options)
    : fc1(register_module("fc1", torch::nn::Linear(options.width, hidden_of(options)))),
      fc2(register_module("fc2", torch::nn::Linear(hidden_of(options), options.width))) {}

at::Tensor VitMlpImpl::forward(const at::Tensor& x) {
  return nn::linear(fc2, at::gelu(nn::linear(fc1, x)));
}

VitBlockImpl::VitBlockImpl(const VitOptions& options)
    : norm1(register_module("norm1", norm_of(options))),
      attn(register_module("attn", nn::SelfAttention(nn::SelfAttentionOptions{
                                       .width = options.width, .heads = options.heads, .causal = false, .name_of_out = "proj"}))),
      norm2(register_module("norm2", norm_of(options))),
      mlp(register_module("mlp", VitMlp(options))) {}

at::Tensor VitBlockImpl::forward(const at::Tensor& x) {
  const auto attended = x + attn(norm1(x));
  return attended + mlp(norm2(attended));
}

VitImpl::VitImpl(const VitOptions& options)
    : image(options.image),
      cls_token(register_parameter("cls_token", torch::nn::init::normal_(at::empty({1, 1, options.width}), 0, 1e-6))),
      pos_embed(
          register_parameter("pos_embed", torch::nn::init::normal_(at::empty({1, 1 + patches_of(options), options.width}), 0, kDeviation))),
      patch_embed(register_module("patch_embed", VitPatches(options))) {
  for (int64_t i = 0; i < options.layers; i++) blocks->push_back(VitBlock(options));
  register_module("blocks", blocks);
  norm = register_module("norm", norm_of(options));
  head = register_module("head", torch::nn::Linear(options.width, options.classes));
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* const linear = module->as<torch::nn::Linear>()) {
      torch::nn::init::normal_(linear->weight, 0, kDeviation);
      torch::nn::init::zeros_(linear->bias);
    }
  }
}

at::Tensor VitImpl::forward(const at::Tensor& images) {
  if (images.dim() != 4 || images.size(2) != image || images.size(3) != image) {
    throw UsageError("Vit: images of [{}] for a model of images of {} by {}; scale them, or set VitOptions::image", joined(images.sizes()),
                     image, image);
  }
  const auto words = patch_embed(images);
  auto x = at::cat({cls_token.expand({words.size(0), 1, words.size(2)}), words}, 1) + pos_embed;
  for (const auto& block : *blocks) x = call(block->as<VitBlock>(), x);
  return nn::linear(head, norm(x.select(1, 0)));
}

std::vector<std::pair<std::string, std::string>> VitImpl::renames() {
  return {{"^class_token$", "cls_token"},
          {"^conv_proj\\.", "patch_embed.proj."},
          {"^encoder\\.pos_embedding$", "pos_embed"},
          {"^encoder\\.ln\\.", "norm."},
          {"^heads\\.head\\.", "head."},
          {"^encoder\\.layers\\.encoder_layer_", "blocks."},
          {"\\.ln_([12])\\.", ".norm$1."},
          {"\\.self_attention\\.in_proj_", ".attn.qkv."},
          {"\\.self_attention\\.out_proj\\.", ".attn.proj."},
          {"\\.mlp\\.(linear_1|0)\\.", ".mlp.fc1."},
          {"\\.mlp\\.(linear_2|3)\\.", ".mlp.fc2."}};
}

}  // namespace tessera::models
