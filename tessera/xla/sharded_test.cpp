// Models train sharded over replicas as over ranks on the CPU. TESSERA_TEST_DEVICES sets the number of replicas.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/env.h"
#include "tessera/optim/adagrad.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/lamb.h"
#include "tessera/optim/lion.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/strategy.h"
#include "tessera/shard/wrap.h"
#include "tessera/xla/init.h"
#include "tests/testing/transports.h"
#include "tests/testing/xla_training.h"

namespace tessera::xla::sharded_test {
namespace {

using namespace cases;

int replicas_wanted() { return std::stoi(env("TESSERA_TEST_DEVICES").value_or("4")); }

const Communicator& replicas_here() {
  static const auto world = init({.devices = replicas_wanted()});
  return world;
}

/// How a model is sharded.
struct Mode {
  const char* name;
  std::function<void(const std::shared_ptr<torch::nn::Module>&, const Communicator&)> shard;
  at::ScalarType computes_in = at::kFloat;
  bool recomputes = false;  // the whole forward is a segment that backward runs again
};

void PrintTo(const Mode& mode, std::ostream* out) { *out << mode.name; }

void shard_nested(const std::shared_ptr<torch::nn::Module>& model, ShardOptions options) { fully_shard(*model, options, wrap_always()); }

std::vector<Mode> modes() {
  return {
      {"Replicated", [](auto& model, auto& world) { fully_shard(*model, sharding_strategy(world, ShardingStrategy::NoShard)); }},
      {"Zero2", [](auto& model, auto& world) { fully_shard(*model, {.mesh = world, .reshard_after_forward = false}); }},
      {"Zero3", [](auto& model, auto& world) { shard_nested(model, {.mesh = world}); }},
      {"Flat", [](auto& model, auto& world) { shard_nested(model, {.mesh = world, .listing = Listing::Flat}); }},
      {"Bf16", [](auto& model, auto& world) { shard_nested(model, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}}); }, at::kBFloat16},
      {"Hybrid",
       [](auto& model, auto& world) {
         const int rows = world.size() % 2 ? 1 : 2;
         shard_nested(model, {.mesh = Mesh(world, MeshShape{.replicate = rows, .shard = world.size() / rows})});
       }},
      {.name = "Recomputed", .shard = [](auto& model, auto& world) { shard_nested(model, {.mesh = world}); }, .recomputes = true},
      {"GatheredAhead", [](auto& model, auto& world) { shard_nested(model, {.mesh = world, .schedule = {.prefetch_depth = 1}}); }},
  };
}

struct Run {
  std::vector<std::vector<float>> losses;  // of each step, of each rank
  std::map<std::string, at::Tensor> state;  // parameters and buffers
};

using Make = std::function<Subject()>;

/// Trains for all replicas in one process, or for one of several ranks, by the same source.
template <class Optimizer>
std::vector<at::Tensor> train_by(const Communicator& world, const Subject& subject, const Mode& mode, const std::vector<at::Tensor>& shards, Optimizer& optimizer,
                                 const std::function<void(double)>& set_lr) {
  const auto of_all = [&](const auto& draw, int step) {
    std::vector<at::Tensor> own;
    for (const int rank : world.local_ranks()) own.push_back(draw(step * 8 + rank));
    return world.from_replicas(own);
  };
  std::vector<at::Tensor> losses;
  for (int step = 0; step < kSteps; step++) {
    optimizer.zero_grad();
    const auto input = of_all(subject.input, step);
    const auto scores = mode.recomputes ? activation::checkpoint(subject.scores, input) : subject.scores(input);
    const auto loss = torch::nn::functional::cross_entropy(scores.to(torch::kFloat), of_all(subject.targets, step));
    loss.backward();
    clip_grad_norm(shards, 1.0);
    set_lr(0.01 / (1 + 0.1 * step));
    optimizer.step();
    losses.push_back(loss.detach());
    world.step_done();
  }
  return losses;
}

/// An optimizer: `train` trains a model with it and returns the loss of each step.
struct Rule {
  std::string name;
  std::function<std::vector<at::Tensor>(const Communicator&, const Subject&, const Mode&)> train;
  bool is_sensitive = false;  // makes full steps even of gradients that are only rounding errors
};

template <class Optimizer, class Options>
Rule of_torch(std::string name, Options options, bool is_sensitive) {
  return {std::move(name), [options](const Communicator& world, const Subject& subject, const Mode& mode) {
            const auto shards = parameters(*subject.module);
            Optimizer optimizer(shards, options);
            return train_by(world, subject, mode, shards, optimizer, [&](double lr) { optimizer.param_groups()[0].options().set_lr(lr); });
          }, is_sensitive};
}
template <class Optimizer, class Options>
Rule of_tessera(std::string name, Options options, bool is_sensitive = false) {
  return {std::move(name), [options](const Communicator& world, const Subject& subject, const Mode& mode) {
            const auto shards = parameters(*subject.module);
            Optimizer optimizer(shards, options);
            return train_by(world, subject, mode, shards, optimizer, [&](double lr) { optimizer.set_lr(lr); });
          }, is_sensitive};
}

const Rule kSgd = of_torch<torch::optim::SGD>("Sgd", torch::optim::SGDOptions(0.05).momentum(0.9), false);
const Rule kAdamW = of_torch<torch::optim::AdamW>("AdamW", torch::optim::AdamWOptions(0.003), true);

Run on_ranks(const Make& make, const Mode& mode, const Rule& rule) {
  const auto ranks = static_cast<size_t>(replicas_wanted());
  Run run;
  run.losses.assign(kSteps, std::vector<float>(ranks));
  std::mutex generator;
  tessera::testing::run_world({.transport = "threads", .ranks = replicas_wanted()}, [&](const Communicator& world) {
    const auto subject = [&] {
      const std::scoped_lock lock(generator);
      torch::manual_seed(3);
      return make();
    }();
    mode.shard(subject.module, world);
    const auto losses = rule.train(world, subject, mode);
    const auto rank = static_cast<size_t>(world.rank());
    for (size_t step = 0; step < losses.size(); step++) run.losses[step][rank] = losses[step].template item<float>();
    auto state = full_state(*subject.module);
    if (rank == 0) run.state = std::move(state);
  });
  return run;
}

Run on_replicas(const Make& make, const Mode& mode, const Rule& rule) {
  const auto& world = replicas_here();
  torch::manual_seed(3);
  const auto subject = make();
  to_device(*subject.module);
  mode.shard(subject.module, world);
  const auto before = metrics();
  const auto losses = rule.train(world, subject, mode);
  EXPECT_LE(metrics().programs.size() - before.programs.size(), 2) << metrics_report();  // another mode may have made the first program
  EXPECT_EQ(metrics().fallbacks, before.fallbacks);
  Run run;
  for (const auto& loss : losses) {
    auto& step = run.losses.emplace_back();
    for (const auto& value : world.replicas(loss)) step.push_back(value.item<float>());
  }
  for (const auto& [name, whole] : full_state(*subject.module)) {
    const auto values = world.replicas(whole);
    for (const auto& value : values) EXPECT_TRUE(at::equal(value, values.front())) << name;
    run.state[name] = values.front();
  }
  return run;
}

std::vector<float> flat(const Run& run) {
  std::vector<float> all;
  for (const auto& step : run.losses) all.insert(all.end(), step.begin(), step.end());
  return all;
}

void expect_same_training(const Make& make, const Mode& mode, const Rule& rule) {
  const auto expected = on_ranks(make, mode, rule), actual = on_replicas(make, mode, rule);
  const auto numbers = flat(actual), wanted = flat(expected);
  ASSERT_EQ(numbers.size(), wanted.size());
  if (mode.computes_in == at::kFloat) {
    for (size_t i = 0; i < numbers.size(); i++) ASSERT_NEAR(numbers[i], wanted[i], 1e-4) << "step " << i / static_cast<size_t>(replicas_wanted());
    if (rule.is_sensitive) return;
    for (const auto& [name, values] : expected.state) {
      EXPECT_LT((actual.state.at(name) - values).abs().max().template item<double>(), 5e-4) << name;
    }
    return;
  }
  const auto full = flat(on_ranks(make, modes()[2], rule));
  EXPECT_LE(mean_distance(numbers, full), 2 * mean_distance(wanted, full) + 0.002) << mean_distance(wanted, full);
}

class Sharded : public ::testing::TestWithParam<Mode> {
 protected:
  static void SetUpTestSuite() { replicas_here(); }  // before the first backward pass
};
INSTANTIATE_TEST_SUITE_P(Modes, Sharded, ::testing::ValuesIn(modes()), [](const auto& info) { return info.param.name; });

class ShardedOptimizers : public ::testing::TestWithParam<Rule> {
 protected:
  static void SetUpTestSuite() { replicas_here(); }
};
INSTANTIATE_TEST_SUITE_P(Rules, ShardedOptimizers,
                         ::testing::Values(of_tessera<optim::SGD>("Sgd", optim::SgdOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true}),
                                           of_tessera<optim::Adam>("Adam", optim::AdamOptions{.weight_decay = 0.1}, true),
                                           of_tessera<optim::AdamW>("AdamW", optim::AdamWOptions{}, true),
                                           of_tessera<optim::Adagrad>("Adagrad", optim::AdagradOptions{}),
                                           of_tessera<optim::Lion>("Lion", optim::LionOptions{}, true),
                                           of_tessera<optim::Lamb>("Lamb", optim::LambOptions{}, true)),
                         [](const auto& info) { return info.param.name; });

TEST_P(ShardedOptimizers, TrainAsOnRanks) { expect_same_training([] { return mlp(); }, modes()[2], GetParam()); }

TEST_P(Sharded, MlpTrainsAsOnRanks) { expect_same_training([] { return mlp(); }, GetParam(), kSgd); }

class ShardedModels : public Sharded {};
/// Returns one mode, or all if TESSERA_TEST_ALL_MODES is set.
std::vector<Mode> chosen_modes() {
  auto all = modes();
  if (!env("TESSERA_TEST_ALL_MODES")) std::erase_if(all, [](const Mode& mode) { return std::string_view(mode.name) != "Zero3"; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Modes, ShardedModels, ::testing::ValuesIn(chosen_modes()), [](const auto& info) { return info.param.name; });

TEST_P(ShardedModels, MlpTrainsAsOnRanks) { expect_same_training([] { return mlp(); }, GetParam(), kAdamW); }
TEST_P(ShardedModels, GptTrainsAsOnRanks) { expect_same_training(gpt, GetParam(), kAdamW); }
TEST_P(ShardedModels, BertTrainsAsOnRanks) { expect_same_training(bert, GetParam(), kAdamW); }
TEST_P(ShardedModels, MnistNetTrainsAsOnRanks) { expect_same_training(mnist, GetParam(), kSgd); }
TEST_P(ShardedModels, BlockOfAResNetTrainsAsOnRanks) { expect_same_training(block_of_a_resnet, GetParam(), kSgd); }

}  // namespace
}  // namespace tessera::xla::sharded_test
