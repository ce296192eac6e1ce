// DenseNets: each layer of a block adds channels to those of all layers before it. Parameters have the names of torchvision's DenseNet.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "tessera/models/image_model.h"
#include "tessera/shard/call.h"

namespace tessera::models {

struct DenseNetOptions {
  int64_t stem = 64;    // channels before the first block
  int64_t growth = 32;  // channels that a layer adds
  std::array<int64_t, 4> layers = {6, 12, 24, 16};
  int64_t classes = 1000;

  static DenseNetOptions of_121() { return {}; }
  static DenseNetOptions of_161() { return {.stem = 96, .growth = 48, .layers = {6, 12, 36, 24}}; }
  static DenseNetOptions of_169() { return {.layers = {6, 12, 32, 32}}; }
  static DenseNetOptions of_201() { return {.layers = {6, 12, 48, 32}}; }
};

/// Returns the channels to be added.
struct DenseLayerImpl : torch::nn::Module {
  DenseLayerImpl(int64_t in, int64_t growth);
  at::Tensor forward(const at::Tensor& x);

  Called<torch::nn::BatchNorm2d> norm1{nullptr};
  Called<torch::nn::Conv2d> conv1{nullptr};
  Called<torch::nn::BatchNorm2d> norm2{nullptr};
  Called<torch::nn::Conv2d> conv2{nullptr};
};
TORCH_MODULE(DenseLayer);

struct DenseBlockImpl : torch::nn::Module {
  DenseBlockImpl(int64_t in, int64_t growth, int64_t layers);
  at::Tensor forward(at::Tensor x);
};
TORCH_MODULE(DenseBlock);

/// Halves height, width and channels.
struct DenseTransitionImpl : torch::nn::Module {
  explicit DenseTransitionImpl(int64_t in);
  at::Tensor forward(const at::Tensor& x);

  Called<torch::nn::BatchNorm2d> norm{nullptr};
  Called<torch::nn::Conv2d> conv{nullptr};
};
TORCH_MODULE(DenseTransition);

struct DenseNetImpl : ImageModel {
  explicit DenseNetImpl(const DenseNetOptions& options = {});

  at::Tensor forward(const at::Tensor& images) override;

  /// From the names in files to those of this model, for checkpoint::WeightsOptions::renamed: files of old versions have dots in more
  /// places.
  static std::vector<std::pair<std::string, std::string>> renames();

  Called<torch::nn::Sequential> features{nullptr};
  Called<torch::nn::Linear> classifier{nullptr};
};
TORCH_MODULE(DenseNet);

}  // namespace tessera::models
