// The small convolutional network of PyTorch/XLA's MNIST example: 28 x 28 images of one channel, ten classes.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "tessera/shard/call.h"

namespace tessera::models {

struct MnistNetImpl : torch::nn::Module {
  MnistNetImpl();

  /// Takes floating-point images {n, 1, 28, 28} and returns log-probabilities {n, 10}.
  at::Tensor forward(const at::Tensor& images);

  Called<torch::nn::Conv2d> conv1{nullptr}, conv2{nullptr};
  Called<torch::nn::BatchNorm2d> bn1{nullptr}, bn2{nullptr};
  Called<torch::nn::Linear> fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(MnistNet);

}  // namespace tessera::models
