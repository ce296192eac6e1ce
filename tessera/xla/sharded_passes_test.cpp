// Steps of a sharded model that are read in the middle, abandoned, or mixed with evaluations.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/recover.h"
#include "tessera/shard/wrap.h"
#include "tessera/xla/init.h"
#include "tessera/xla/metrics.h"
#include "tests/testing/folder.h"

namespace tessera::xla::sharded_passes_test {
namespace {

constexpr int kReplicas = 4, kLayers = 6;
constexpr int64_t kWidth = 128, kRows = 4;
constexpr int64_t kUnit = (kWidth * kWidth + kWidth) * 4;  // in bytes

const Communicator& four() {
  static const auto world = init({.devices = kReplicas});
  return world;
}

struct Model {
  torch::nn::Sequential net;
  optim::SGD optimizer;

  static torch::nn::Sequential sharded() {
    torch::manual_seed(1);
    torch::nn::Sequential net;
    for (int i = 0; i < kLayers; i++) {
      net->push_back(torch::nn::Linear(kWidth, kWidth));
      net->push_back(torch::nn::Tanh());
    }
    to_device(*net);
    fully_shard(*net, {.mesh = four()}, wrap_always());
    return net;
  }
  explicit Model(torch::nn::Sequential model = sharded()) : net(std::move(model)), optimizer(parameters(*net), {.lr = 0.1}) {}

  at::Tensor loss(int step) {
    std::vector<at::Tensor> batches;
    for (int replica = 0; replica < kReplicas; replica++) batches.push_back(torch::full({kRows, kWidth}, 0.1 * (step + replica)));
    return net->forward(four().from_replicas(batches)).pow(2).mean();
  }
};

/// Callbacks between forward and backward, and after each step.
struct Between {
  std::function<void(Model&, const at::Tensor& loss)> passes = [](Model&, const at::Tensor&) {};
  std::function<void(Model&)> steps = [](Model&) {};
};

struct Trained {
  std::vector<at::Tensor> losses, parameters;
};

Trained train(const Between& between) {
  Model model;
  Trained run;
  for (int step = 0; step < 5; step++) {
    const auto loss = model.loss(step);
    between.passes(model, loss);
    loss.backward();
    model.optimizer.step();
    model.optimizer.zero_grad();
    for (const auto& each : four().replicas(loss.detach())) run.losses.push_back(each);
    between.steps(model);
  }
  for (const auto& [name, whole] : full_state(*model.net)) run.parameters.push_back(four().replicas(whole)[0]);
  return run;
}

void expect_same(const Trained& found, const Trained& expected) {
  for (size_t i = 0; i < expected.losses.size(); i++) EXPECT_TRUE(at::allclose(found.losses[i], expected.losses[i], 1e-5, 1e-7)) << i;
  for (size_t i = 0; i < expected.parameters.size(); i++) EXPECT_TRUE(at::allclose(found.parameters[i], expected.parameters[i], 1e-5, 1e-6)) << i;
}

class ShardedPasses : public ::testing::Test {
 protected:
  static const Trained& undisturbed() {
    static const auto run = [] { four(); return train({}); }();
    return run;
  }
};

TEST_F(ShardedPasses, MayBeReadInTheMiddle) {
  const auto& expected = undisturbed();
  const auto before = metrics().programs.size();
  const auto run = train({.passes = [](Model&, const at::Tensor& loss) { EXPECT_GT(loss.item<float>(), 0); }});
  expect_same(run, expected);
  const auto programs = metrics().programs;
  for (auto i = before; i < programs.size(); i++) {
    const auto& [operations, seconds, from_disk, executions, has_backward, memory, collectives] = programs[i];
    if (executions == 1) continue;
    EXPECT_LT(memory.outputs - memory.aliased, 3 * kUnit / 2) << "activations, and the unit that stays from forward to backward";
  }
}

TEST_F(ShardedPasses, StandBesideEvaluations) {
  const auto& expected = undisturbed();
  expect_same(train({.steps = [](Model& model) {
                const torch::NoGradGuard no_grad;
                EXPECT_GT(model.loss(9).item<float>(), 0);
              }}),
              expected);
}

TEST_F(ShardedPasses, MayBeGivenUp) {
  const auto& expected = undisturbed();
  expect_same(train({.steps = [](Model& model) {
                model.loss(9).sum();  // an exception may have ended this pass
                recover(*model.net);
              }}),
              expected);
}

TEST_F(ShardedPasses, MayBeGivenUpInTheMiddle) {
  const auto& expected = undisturbed();
  const auto throws = [](Model& model) {
    auto loss = model.loss(9);
    loss.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no more"); });
    EXPECT_ANY_THROW((loss * 2).backward());
    recover(*model.net);
    model.optimizer.zero_grad();
  };
  expect_same(train({.steps = throws}), expected);
}

TEST_F(ShardedPasses, DrawTheSameAfterACheckpoint) {
  Model model;
  const testing::Folder folder;
  const auto drawn = [] { return four().replicas(torch::rand({4}, torch::TensorOptions(four().traits().device))); };
  drawn();
  checkpoint::Contents contents{.model = &*model.net};
  checkpoint::save(folder / "run", contents, four());
  const auto expected = drawn();
  torch::manual_seed(9);
  checkpoint::load(folder / "run", contents, four());
  const auto again = drawn();
  for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(at::equal(again[i], expected[i])) << i;
  EXPECT_FALSE(at::equal(again[0], again[1]));
}

}  // namespace
}  // namespace tessera::xla::sharded_passes_test
