// Replicas with batches of their own train as one process on the whole batch. TESSERA_TEST_DEVICES sets the number of replicas.
#include "tessera/base/env.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/init.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::xla {
namespace {

constexpr int kStepsOfReplicas = 50;
constexpr int64_t kRows = 4;  // of each replica

const Communicator& replicas_here() {
  static const auto world = init({.devices = std::stoi(env("TESSERA_TEST_DEVICES").value_or("4"))});
  return world;
}

torch::nn::Sequential small_mlp() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::GELU(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})),
                               torch::nn::Linear(32, 10));
}

struct Batch {
  at::Tensor x, y;
  static Batch drawn(int step, int64_t rows) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
    return {torch::randn({rows, 16}, generator), torch::randint(10, {rows}, generator, torch::kLong)};
  }
};

/// Trains and returns the losses of the whole batch. `world` averages gradients and losses, if it is given.
template <class Optimizer>
std::vector<at::Tensor> losses_of(torch::nn::Sequential& model, Optimizer optimizer, const Communicator* world) {
  std::vector<at::Tensor> losses;
  for (int step = 0; step < kStepsOfReplicas; step++) {
    optimizer.zero_grad();
    auto [x, y] = Batch::drawn(step, kRows * replicas_here().size());
    if (world) {
      x = world->from_replicas(x.split(kRows));
      y = world->from_replicas(y.split(kRows));
    }
    const auto loss = torch::nn::functional::cross_entropy(model->forward(x), y);
    loss.backward();
    losses.push_back(loss.detach().clone());
    if (world) {
      for (const auto& parameter : model->parameters()) world->all_reduce(parameter.grad(), {.op = Reduce::Mean}).wait();
      world->all_reduce(losses.back(), {.op = Reduce::Mean}).wait();
    }
    for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01 / (1 + step));
    optimizer.step();
    if (world) world->step_done();
  }
  return losses;
}

template <class Optimizer, class Options>
void expect_same_training(const Options& options) {
  const auto& world = replicas_here();
  auto here = small_mlp(), there = small_mlp();
  to_device(*there);
  const auto before = metrics();
  const auto expected = losses_of(here, Optimizer(here->parameters(), options), nullptr);
  const auto actual = losses_of(there, Optimizer(there->parameters(), options), &world);
  EXPECT_EQ(metrics().compiles + metrics().loaded_from_disk - before.compiles - before.loaded_from_disk, 2);
  for (size_t step = 0; step < kStepsOfReplicas; step++) {
    for (const auto& loss : world.replicas(actual[step])) EXPECT_NEAR(loss.template item<float>(), expected[step].template item<float>(), 1e-4) << step;
  }
  for (const auto& [name, parameter] : there->named_parameters().pairs()) {
    const auto values = world.replicas(parameter);
    for (const auto& value : values) EXPECT_TRUE(at::equal(value, values[0])) << name;
  }
}

TEST(Replicated, TrainsBySgd) { expect_same_training<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)); }

TEST(Replicated, TrainsByAdamW) { expect_same_training<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01)); }

/// Threads of XLA's pool that wait in a collective must not be those that the products of other replicas wait for.
TEST(Replicated, LargeProductsDoNotWaitForEachOther) {
  const auto& world = replicas_here();
  torch::nn::Sequential model;
  for (int i = 0; i < 4; i++) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(512, 512).bias(false)));
  to_device(*model);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01));
  for (int step = 0; step < 3; step++) {
    optimizer.zero_grad();
    const auto loss = model->forward(torch::ones({128, 512}, torch::TensorOptions(world.traits().device))).pow(2).mean();
    loss.backward();
    for (const auto& parameter : model->parameters()) world.all_reduce(parameter.grad(), {.op = Reduce::Mean}).wait();
    optimizer.step();
    world.step_done();
    EXPECT_TRUE(std::isfinite(loss.detach().item<float>()));
  }
}

TEST(Replicated, DrawsDifferentRandomNumbersOnEachReplica) {
  const auto values = replicas_here().replicas(torch::rand({4}, torch::TensorOptions(replicas_here().traits().device)));
  for (size_t r = 1; r < values.size(); r++) EXPECT_FALSE(at::equal(values[r], values[0]));
}

}  // namespace
}  // namespace tessera::xla
