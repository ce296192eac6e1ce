// Inception v3: blocks of branches of convolutions. Parameters have the names of torchvision's Inception3 without its auxiliary head. Its
// files have that head, too: they are loaded with WeightsOptions::may_be_unknown = {"AuxLogits\\..*"}.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <string>
#include <vector>

#include "tessera/models/image_model.h"
#include "tessera/shard/call.h"

namespace tessera::models {

struct InceptionOptions {
  int64_t classes = 1000;
  double dropout = 0.5;
};

/// A convolution in a block. One of stride 1 keeps height and width; one of stride 2 has no padding.
struct InceptionStep {
  enum class From {
    Block,   // what the block is given
    Pooled,  // the same, as means of 3 x 3 pixels
    Step,    // what the step before makes
    Beside,  // what the step before is given
  };
  std::string name;
  From from = From::Block;
  int64_t channels = 0;
  std::array<int64_t, 2> size = {1, 1};
  int64_t stride = 1;
};

/// A convolution, means of its 3 x 3 pixels if asked for, a batch norm and a ReLU.
struct InceptionConvolutionImpl : torch::nn::Module {
  explicit InceptionConvolutionImpl(const torch::nn::Conv2dOptions& options, bool pools = false);
  at::Tensor forward(const at::Tensor& x);

  const bool pools;
  Called<torch::nn::Conv2d> conv{nullptr};
  Called<torch::nn::BatchNorm2d> bn{nullptr};
};
TORCH_MODULE(InceptionConvolution);

/// Returns what no other step takes and, if it has steps of stride 2, the largest of 3 x 3 pixels of what it is given.
struct InceptionBlockImpl : torch::nn::Module {
  InceptionBlockImpl(int64_t in, const std::vector<InceptionStep>& table);
  at::Tensor forward(const at::Tensor& x);

  const std::vector<InceptionStep> steps;
  std::vector<Called<InceptionConvolution>> convolutions;  // of each step
  bool reduces = false;
  int64_t channels = 0;  // that it returns
};
TORCH_MODULE(InceptionBlock);

struct InceptionImpl : ImageModel {
  explicit InceptionImpl(const InceptionOptions& options = {});

  /// Takes images of at least 75 by 75; it was made for 299 by 299, whose values are from -1 to 1.
  at::Tensor forward(const at::Tensor& images) override;

  std::vector<Called<InceptionConvolution>> stem;
  std::vector<Called<InceptionBlock>> blocks;
  Called<torch::nn::Dropout> dropout{nullptr};
  Called<torch::nn::Linear> fc{nullptr};
};
TORCH_MODULE(Inception);

}  // namespace tessera::models
