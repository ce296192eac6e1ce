// A small model with everything that a checkpoint must handle, and a training run of it that can stop and resume at any step.
#pragma once

#include <torch/torch.h>

#include "tessera/optim/adam.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"
#include "tests/testing/numbers.h"

namespace tessera::testing {

/// It has a channels-last weight, buffers, a tied and a frozen parameter, and sizes that the numbers of ranks in tests do not divide.
struct Picture : torch::nn::Module {
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr}, frozen{nullptr};
  at::Tensor tied;

  explicit Picture(double scale = 0.5) {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(5));
    head = register_module("head", torch::nn::Linear(5, 5));
    frozen = register_module("frozen", torch::nn::Linear(5, 3));
    tied = register_parameter("tied", head->weight);
    fill_with_numbers(*this, scale);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto pooled = torch::relu(norm(conv(x))).mean(at::IntArrayRef{2, 3});
    return frozen(torch::linear(torch::tanh(head(pooled)), tied));
  }
};

using ShardPicture = std::function<void(const std::shared_ptr<Picture>&, const Communicator&)>;

inline void shard_nested(const std::shared_ptr<Picture>& model, const Communicator& world) {
  fully_shard(model->conv, {.mesh = world});
  fully_shard(model, {.mesh = world});
}

/// Trains a Picture. Each rank has its own batches. Gradients of parameters that are not sharded are averaged here.
struct PictureRun {
  Communicator world;
  std::shared_ptr<Picture> model;
  std::vector<at::Tensor> trained;
  std::unique_ptr<optim::Optimizer> optimizer;

  explicit PictureRun(const Communicator& ranks, const ShardPicture& shard = shard_nested, double scale = 0.5)
      : world(ranks), model(std::make_shared<Picture>(scale)) {
    shard(model, world);
    for (const auto& parameter : parameters(*model)) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    optimizer = std::make_unique<optim::AdamW>(trained, optim::AdamWOptions{.lr = 0.05});
  }

  /// Runs the steps from `first` up to, but not including, `last`. Returns their losses.
  std::vector<double> train(int first, int last) const {
    std::vector<double> losses;
    for (int step = first; step < last; step++) {
      const auto loss = model->forward(numbers({4, 3, 4, 4}, 100 * step + world.rank())).pow(2).mean();
      loss.backward();
      for (const auto& parameter : trained) {
        if (shard_info(parameter)) continue;
        const auto mean = parameter.grad().clone(at::MemoryFormat::Contiguous);
        world.all_reduce(mean, {.op = Reduce::Mean}).wait();
        parameter.grad().copy_(mean);
      }
      optimizer->step();
      optimizer->zero_grad();
      losses.push_back(loss.item<double>());
    }
    return losses;
  }
};

}  // namespace tessera::testing
