// Parity tests: train the same model sharded and replicated, on the same ranks and batches, and compare the results.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/shard/fully_shard.h"

namespace tessera::testing {

/// A model that makes its own batches, so that train() works with any model.
struct TrainedModel : torch::nn::Module {
  virtual at::Tensor loss(at::Generator& batches) = 0;
  /// Called after each step of the optimizer, with the optimizer's parameters.
  virtual void after_step(const std::vector<at::Tensor>& /*parameters*/) {}
};

using MakeModel = std::function<std::shared_ptr<TrainedModel>()>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
/// Shards the model; the second argument is the world.
using Shard = std::function<void(const std::shared_ptr<TrainedModel>&, const Communicator&)>;

/// Makes the model one unit.
void as_one_unit(const std::shared_ptr<TrainedModel>& model, const Communicator& world);
/// Makes each child a unit, and the model's own parameters another.
void nested(const std::shared_ptr<TrainedModel>& model, const Communicator& world);

/// When the gradients of a step's passes are averaged over the ranks.
enum class Meets {
  InEachPass,            // gradients add up in the shards
  ShardGroupInEachPass,  // gradients of other replicas are averaged only in the last pass: set_requires_all_reduce
  InTheLastPass,         // no_sync
  AfterTheLastPass,      // no_sync and sync_gradients
};

/// How a step computes its gradients.
struct Passes {
  int count = 1;
  Meets meets = Meets::InEachPass;
  int replicas =
      1;  // copies of the model, along one axis of a mesh; the mean is first taken over the other axis, over which the model is sharded
  UnusedParameters unused = UnusedParameters::Refuse;
  std::vector<int> host_of = {};  // the number of each rank's host; one host if empty
};

struct Trained {
  std::vector<double> losses;
  std::vector<at::Tensor> parameters;  // whole, not sharded
};

/// Trains on this rank. Without `shard` the parameters are replicated, and their gradients are averaged over the ranks in rank order.
Trained train(const Communicator& world, const MakeModel& make, const MakeOptimizer& optimizer, int steps, const Shard& shard = {},
              const Passes& passes = {});

/// Fails the test unless losses and parameters of both kinds of training have the same bits on every rank, or differ by no more than
/// `tolerance`.
void expect_parity(int ranks, const MakeModel& make, const MakeOptimizer& optimizer, int steps, const Shard& shard,
                   const Passes& passes = {}, double tolerance = 0);

/// Makes a model from the same seed on every rank. It takes a lock, because all ranks of a test are threads that share libtorch's default
/// generator.
std::shared_ptr<TrainedModel> seeded(const MakeModel& make);

}  // namespace tessera::testing
