// AlexNet, in the form of torchvision's, whose names the parameters have.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include "tessera/models/image_model.h"
#include "tessera/shard/call.h"

namespace tessera::models {

struct AlexNetOptions {
  int64_t classes = 1000;
  double dropout = 0.5;
};

struct AlexNetImpl : ImageModel {
  explicit AlexNetImpl(const AlexNetOptions& options = {});
  at::Tensor forward(const at::Tensor& images) override;

  Called<torch::nn::Sequential> features, classifier;
};
TORCH_MODULE(AlexNet);

}  // namespace tessera::models
