// A Trainer whose process stands for four ranks trains as the Trainers of four ranks do.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>

#include "tessera/base/move_module.h"
#include "tessera/data/loader.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/parameters.h"
#include "tessera/train/trainer.h"
#include "tessera/xla/init.h"
#include "tessera/xla/metrics.h"
#include "tests/testing/transports.h"

namespace tessera::xla::trainer_test {
namespace {

constexpr int kRanks = 4;
constexpr int64_t kSamples = 22;  // the last batch of eight has two samples of padding

data::Samples fetch(std::span<const int64_t> numbers) {
  const auto rows = at::tensor(at::IntArrayRef(numbers.data(), numbers.size()), at::kLong);
  return {.inputs = rows.to(at::kFloat).unsqueeze(1).mul(at::arange(1, 7)).sin(), .targets = rows % 3};
}

struct Trained {
  std::vector<double> losses;
  at::Tensor answers, labels;
};

Trained train(const Communicator& world, std::mutex& generator) {
  Trainer trainer({.world = world});
  auto model = [&] {
    const std::scoped_lock lock(generator);
    trainer.set_seed(3);
    return torch::nn::Sequential(torch::nn::Linear(6, 16), torch::nn::GELU(), torch::nn::Linear(16, 3));
  }();
  trainer.prepare(model);
  optim::AdamW optimizer(parameters(*model), {.lr = 0.02});
  const data::SamplerOptions samples{
      .size = kSamples, .global_batch = 2 * kRanks, .local_ranks = world.local_ranks(), .ranks = world.size(), .tail = data::Tail::Fill, .seed = 1};
  data::Loader loader(data::Sampler(samples), fetch, {.workers = 2});
  trainer.prepare(optimizer, loader);
  Trained run;
  for (int epoch = 0; epoch < 3; epoch++) {
    for (const auto& batch : loader) {
      EXPECT_EQ(batch.inputs.device(), world.traits().device);
      EXPECT_EQ(batch.inputs.sizes(), at::IntArrayRef({2, 6}));
      const auto accumulation = trainer.accumulate();
      const auto loss = torch::cross_entropy_loss(model->forward(batch.inputs), batch.targets);
      trainer.backward(loss);
      trainer.clip_grad_norm(1.0);
      trainer.step();
      run.losses.push_back(trainer.reduce(loss, Reduce::Mean).item<double>());
    }
    const torch::NoGradGuard no_grad;
    auto in_order = samples;
    in_order.order = data::Order::AsStored;
    data::Loader evaluation(data::Sampler(in_order), fetch, {.workers = 1});
    evaluation.place([&](const at::Tensor& rows) { return world.to_local_ranks(rows); });
    std::vector<at::Tensor> answers, labels;
    for (const auto& batch : evaluation) {
      const auto [own, targets] = trainer.gather_for_metrics({model->forward(batch.inputs).argmax(1), batch.targets}, batch);
      answers.push_back(own);
      labels.push_back(targets);
      world.step_done();
    }
    run.answers = at::cat(answers).cpu();
    run.labels = at::cat(labels).cpu();
  }
  EXPECT_EQ(trainer.steps(), 9);
  EXPECT_EQ(trainer.process_index(), world.local_ranks().front());
  EXPECT_FALSE(trainer.check_trigger());
  EXPECT_EQ(trainer.split_between_processes(at::arange(kSamples)).numel(), world.local_ranks().size() == kRanks ? kSamples : 6 - world.rank() / 2);
  return run;
}

TEST(TrainerOnReplicas, TrainsAsOnRanks) {
  const auto replicas = init({.devices = kRanks});  // before the first backward pass
  std::mutex generator;
  Trained expected;
  testing::run_world({.transport = "threads", .ranks = kRanks}, [&](const Communicator& world) {
    auto run = train(world, generator);
    if (world.rank() == 0) expected = std::move(run);
  });
  const auto run = train(replicas, generator);
  ASSERT_EQ(run.losses.size(), expected.losses.size());
  for (size_t i = 0; i < run.losses.size(); i++) EXPECT_NEAR(run.losses[i], expected.losses[i], 1e-4) << i;
  EXPECT_TRUE(at::equal(run.labels, at::arange(kSamples) % 3));
  EXPECT_TRUE(at::equal(run.labels, expected.labels));
  EXPECT_TRUE(at::equal(run.answers, expected.answers));
  EXPECT_TRUE(metrics().fallbacks.empty()) << metrics_report();
}

}  // namespace
}  // namespace tessera::xla::trainer_test
