// A vision transformer: an image is cut into patches, which an encoder reads like words; the scores are computed from an extra token before
// the patches. Parameters have the names of timm's VisionTransformer.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/models/image_model.h"
#include "tessera/nn/attention.h"

namespace tessera::models {

struct VitOptions {
  int64_t image = 224;  // height and width
  int64_t patch = 16;   // height and width; must divide the image's height and width
  int64_t channels = 3;
  int64_t width = 768;
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t hidden = 0;  // width within the perceptrons; 0: four times the width
  int64_t classes = 1000;

  /// Those that timm calls vit_tiny_patch16_224 and so on; base() is also torchvision's vit_b_16.
  static VitOptions tiny() { return {.width = 192, .heads = 3}; }
  static VitOptions small() { return {.width = 384, .heads = 6}; }
  static VitOptions base() { return {}; }
  static VitOptions large() { return {.width = 1024, .layers = 24, .heads = 16}; }
  static VitOptions huge() { return {.patch = 14, .width = 1280, .layers = 32, .heads = 16}; }
  static VitOptions giant() { return {.patch = 14, .width = 1408, .layers = 40, .heads = 16, .hidden = 6144}; }
  /// 10 and 60 billion parameters.
  static VitOptions of_10b() { return {.patch = 14, .width = 5120, .layers = 32, .heads = 32}; }
  static VitOptions of_60b() { return {.patch = 14, .width = 10240, .layers = 48, .heads = 32}; }
};

/// Takes images and returns {batch, patches, width}.
struct VitPatchesImpl : torch::nn::Module {
  explicit VitPatchesImpl(const VitOptions& options);
  at::Tensor forward(const at::Tensor& images);

  Called<torch::nn::Conv2d> proj{nullptr};
};
TORCH_MODULE(VitPatches);

struct VitMlpImpl : torch::nn::Module {
  explicit VitMlpImpl(const VitOptions& options);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(VitMlp);

struct VitBlockImpl : torch::nn::Module {
  explicit VitBlockImpl(const VitOptions& options);
  at::Tensor forward(const at::Tensor& x);

  Called<torch::nn::LayerNorm> norm1{nullptr};
  Called<nn::SelfAttention> attn{nullptr};
  Called<torch::nn::LayerNorm> norm2{nullptr};
  Called<VitMlp> mlp{nullptr};
};
TORCH_MODULE(VitBlock);

struct VitImpl : ImageModel {
  explicit VitImpl(const VitOptions& options = {});

  /// Takes images {batch, channels, height, width} and returns scores {batch, classes}.
  at::Tensor forward(const at::Tensor& images) override;

  /// From the names in files to those of this model, for checkpoint::WeightsOptions::renamed: torchvision has others than timm.
  static std::vector<std::pair<std::string, std::string>> renames();

  const int64_t image;
  at::Tensor cls_token, pos_embed;  // {1, 1, width} and {1, 1 + patches, width}
  Called<VitPatches> patch_embed{nullptr};
  torch::nn::ModuleList blocks;
  Called<torch::nn::LayerNorm> norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Vit);

}  // namespace tessera::models
