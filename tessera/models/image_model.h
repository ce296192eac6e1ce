// Networks that take images and return scores of classes, by the names that torchvision and timm have for them. Parameters and buffers have
// their names, too, so that weights can be exchanged.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::models {

struct ImageModel : torch::nn::Module {
  /// Takes images {n, 3, height, width} and returns scores {n, classes}.
  virtual at::Tensor forward(const at::Tensor& images) = 0;
};

struct ImageModelOptions {
  int64_t classes = 1000;
  int64_t image = 224;                 // height and width, which a ViT has to know; the other networks take images of any size
  std::optional<double> dropout = {};  // unset: as in torchvision; a ResNet has none
};

/// The network of this name, with initial weights drawn as torchvision draws them, or timm for ViTs (vit_b_16 begins as timm's
/// vit_base_patch16_224). Throws UsageError if there is none, or if images are smaller than it takes them.
std::shared_ptr<ImageModel> make_image_model(const std::string& name, const ImageModelOptions& options = {});

/// torchvision's alexnet, densenet, inception_v3, resnet, squeezenet, vgg and vit_b_16; timm's ViTs from vit_tiny_patch16_224 to
/// vit_giant_patch14_224; vit_10b and vit_60b.
const std::vector<std::string>& image_model_names();

/// The facts about a network that a program may need before it makes one.
struct ImageNetwork {
  std::string blocks;    // the class whose modules can be units, as configuration files name it
  std::string head;      // the layer that makes scores
  int64_t smallest = 1;  // the least height and width of images; for a ViT, images are also multiples of it
  int64_t image = 224;   // the height and width of images for which the published weights were trained
};
const ImageNetwork& image_network(const std::string& name);

/// The means that were taken from values of pixels, from 0 to 1, and the deviations that these were then divided by, for published weights.
struct PixelScale {
  std::array<double, 3> mean, deviation;
};
/// All 0.5 for inception_v3 and timm's ViTs, those of ImageNet for the others.
PixelScale pixel_scale_of(const std::string& name);

/// From names in files to those of this network, for checkpoint::WeightsOptions::renamed: files of torchvision and timm can then be loaded.
/// Those of inception_v3 also have tensors "AuxLogits\\..*", which may_be_unknown has to allow, and old files lack
/// ".*\\.num_batches_tracked", which may_be_missing has to allow.
std::vector<std::pair<std::string, std::string>> renames_of(const std::string& name);

}  // namespace tessera::models
