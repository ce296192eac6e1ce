// Sharded equals replicated: trains the same model both ways, on the same ranks and batches, and compares.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/shard/fully_shard.h"

namespace tessera::testing {

/// A model that makes its own batches, so that one test body serves any.
struct TrainedModel : torch::nn::Module {
  virtual at::Tensor loss(at::Generator& batches) = 0;
  /// Whatever else a program does after its optimizer's step, with what that was given.
  virtual void after_step(const std::vector<at::Tensor>& /*parameters*/) {}
};

using MakeModel = std::function<std::shared_ptr<TrainedModel>()>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
/// Shards the model; the second argument is the world.
using Shard = std::function<void(const std::shared_ptr<TrainedModel>&, const Communicator&)>;

/// The whole model as one unit.
void as_one_unit(const std::shared_ptr<TrainedModel>& model, const Communicator& world);
/// Every child a unit, the rest another.
void nested(const std::shared_ptr<TrainedModel>& model, const Communicator& world);

struct Trained {
  std::vector<double> losses;
  std::vector<at::Tensor> parameters;  // whole
};

/// Trains on this rank, replicated without `shard`: gradients are averaged over the ranks, in rank order.
Trained train(const Communicator& world, const MakeModel& make, const MakeOptimizer& optimizer, int steps, const Shard& shard = {});

/// Fails the test unless losses and parameters agree to the bit on every rank.
void expect_parity(int ranks, const MakeModel& make, const MakeOptimizer& optimizer, int steps, const Shard& shard);

/// Makes a model from the same seed on every rank. (libtorch has one generator per process, which threads must not share.)
std::shared_ptr<TrainedModel> seeded(const MakeModel& make);

}  // namespace tessera::testing
