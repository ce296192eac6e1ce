// VGGs of 11 to 19 layers, with or without batch norms. The parameters have the names of torchvision's.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <array>

#include "tessera/models/image_model.h"
#include "tessera/shard/call.h"

namespace tessera::models {

struct VggOptions {
  std::array<int64_t, 5> convolutions = {2, 2, 3, 3, 3};  // before each pooling
  bool batch_norm = false;                                // after each convolution
  int64_t classes = 1000;
  double dropout = 0.5;

  static VggOptions vgg11(bool batch_norm = false) { return {{1, 1, 2, 2, 2}, batch_norm}; }
  static VggOptions vgg13(bool batch_norm = false) { return {{2, 2, 2, 2, 2}, batch_norm}; }
  static VggOptions vgg16(bool batch_norm = false) { return {{2, 2, 3, 3, 3}, batch_norm}; }
  static VggOptions vgg19(bool batch_norm = false) { return {{2, 2, 4, 4, 4}, batch_norm}; }
};

struct VggImpl : ImageModel {
  explicit VggImpl(const VggOptions& options = {});
  at::Tensor forward(const at::Tensor& images) override;

  Called<torch::nn::Sequential> features, classifier;
};
TORCH_MODULE(Vgg);

}  // namespace tessera::models
