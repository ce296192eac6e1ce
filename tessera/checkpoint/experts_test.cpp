// Tests of checkpoints of models whose ranks have different parameters, such as experts on some ranks, or values that have drifted apart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/lamb.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::experts_test {
namespace {

using checkpoint::Contents;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A layer that all ranks have, and experts of which a rank may have only some.
struct Experts : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 5));
  std::map<int, torch::nn::Sequential> expert;
  explicit Experts(const std::vector<int>& present, double shift = 0) {
    for (const int which : present) {
      torch::nn::Sequential layers(torch::nn::Linear(5, 5), torch::nn::BatchNorm1d(5));
      expert[which] = register_module("expert_" + std::to_string(which), layers);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : layers->parameters()) parameter.copy_(numbers(parameter.sizes(), which + shift));
    }
    const torch::NoGradGuard no_grad;
    for (auto& parameter : first->parameters()) parameter.copy_(numbers(parameter.sizes(), shift));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = torch::tanh(first(x));
    auto sum = at::zeros({});
    for (const auto& [which, layers] : expert) sum = sum + at::Tensor(torch::nn::Sequential(layers)->forward(y)).pow(2).mean();
    return sum;
  }
};

/// A run on four ranks, each half of which has one expert, or on fewer ranks, which have both.
struct ExpertsRun {
  static constexpr int kHalf = 2;
  enum class By { AdamW, Lamb, Torch };

  explicit ExpertsRun(const Communicator& world, By by = By::AdamW, double shift = 0)
      : world(world),
        divided(world.size() == 2 * kHalf),
        model(std::make_shared<Experts>(divided ? std::vector<int>{world.rank() / kHalf} : std::vector<int>{0, 1}, shift)),
        mesh(divided ? Mesh::of_groups(world, {{0, 1}, {2, 3}}) : Mesh(world)) {
    for (const auto& [which, layers] : model->expert) fully_shard(layers.ptr(), {.mesh = mesh});
    fully_shard(model, {.mesh = world});
    if (by == By::AdamW) ours = std::make_unique<optim::AdamW>(parameters(*model), optim::AdamWOptions{.lr = 0.1});
    if (by == By::Lamb) ours = std::make_unique<optim::Lamb>(parameters(*model), optim::LambOptions{.lr = 0.1});
    if (by == By::Torch) theirs = std::make_unique<torch::optim::AdamW>(parameters(*model), torch::optim::AdamWOptions(0.1));
  }
  Contents contents() const {
    return {.model = model.get(), .optimizer = ours ? checkpoint::OptimizerRef(ours.get()) : checkpoint::OptimizerRef(theirs.get())};
  }
  void train() const {
    for (int step = 0; step < 3; step++) {
      model->forward(numbers({4, 6}, step + world.rank())).backward();
      ours ? ours->step() : (theirs->step(), void());
      ours ? ours->zero_grad() : theirs->zero_grad();
    }
  }
  /// Returns the whole values of the parameters that this rank has.
  std::map<std::string, at::Tensor> values() const {
    std::map<std::string, at::Tensor> result;
    for (const auto& [name, shard] : named_parameters(*model)) result[name] = full_parameter(shard);
    return result;
  }

  Communicator world;
  bool divided;
  std::shared_ptr<Experts> model;
  Mesh mesh;
  std::unique_ptr<optim::Optimizer> ours;
  std::unique_ptr<torch::optim::Optimizer> theirs;
};

TEST(ExpertsCheckpoint, GathersExpertsThatPartsOfTheRanksHave) {
  const auto load = [](const std::filesystem::path& from, const ExpertsRun& run) {
    auto into = run.contents();
    checkpoint::load(from, into, run.world);
  };
  for (const auto by : {ExpertsRun::By::AdamW, ExpertsRun::By::Lamb, ExpertsRun::By::Torch}) {
    const Folder folder;
    std::vector<std::map<std::string, at::Tensor>> at_end(4);
    with_ranks(4, [&](const Communicator& world) {
      const ExpertsRun run(world, by);
      run.train();
      checkpoint::save(folder / "four", run.contents(), world);
      run.train();
      at_end[static_cast<size_t>(world.rank())] = run.values();
    });
    std::map<std::string, at::Tensor> saved;
    with_ranks(2, [&](const Communicator& world) {
      const ExpertsRun run(world, by, 0.25);
      load(folder / "four", run);
      if (const auto values = run.values(); world.rank() == 0) saved = values;
      checkpoint::save(folder / "two", run.contents(), world);
    });
    EXPECT_EQ(saved.size(), 10);
    for (const auto* from : {"four", "two"}) {
      with_ranks(4, [&](const Communicator& world) {
        const ExpertsRun run(world, by, 0.5);
        load(folder / from, run);
        for (const auto& [name, values] : run.values()) EXPECT_TRUE(at::equal(values, saved.at(name))) << name;
        run.train();
        expect_same(run.values(), at_end[static_cast<size_t>(world.rank())]);
        EXPECT_EQ(run.values().size(), 6);
      });
    }
    with_ranks(4, [&](const Communicator& world) {
      const ExpertsRun run(world, by, 0.5);
      checkpoint::load_weights(*run.model, folder / "two");  // a checkpoint in which each rank has all experts
      for (const auto& [name, values] : run.values()) EXPECT_TRUE(at::equal(values, saved.at(name))) << name;
    });
  }
}

TEST(ExpertsCheckpoint, HasTheParametersOfAllRanksInTheGroupsOfPython) {
  const Folder folder;
  with_ranks(4, [&](const Communicator& world) {
    const ExpertsRun run(world);
    run.train();
    checkpoint::save(folder / "dcp", run.contents(), world, {.format = checkpoint::Format::Dcp});
  });
  with_ranks(2, [&](const Communicator& world) {
    const ExpertsRun run(world);
    run.train();
    checkpoint::save(folder / "whole", run.contents(), world, {.format = checkpoint::Format::Dcp});
  });
  const auto groups_of = [&](const char* name) {
    return nlohmann::json::parse(checkpoint::read_run(folder / name).notes.front().at(checkpoint::kSettingsNote));
  };
  EXPECT_EQ(groups_of("dcp"), groups_of("whole"));
  EXPECT_EQ(groups_of("dcp").at(0).at("params").size(), 10U);
}

TEST(ExpertsCheckpoint, RefusesToKeepOneOfSeveralParameters) {
  const Folder folder;
  with_ranks(4, [&](const Communicator& world) {
    const auto said = AllOf(HasSubstr("a save would keep one of several parameters of the same name: 'first.bias', 'first.weight'"),
                            HasSubstr("with the communicator of its mesh"));
    const auto mesh = Mesh::of_groups(world, {{0, 1}, {2, 3}});
    Experts inside({});
    fully_shard(inside.first, {.mesh = mesh});
    fully_shard(inside, {.mesh = world});
    Experts whole({});
    fully_shard(whole, {.mesh = mesh});
    checkpoint::AsyncSaver saver(world);
    for (auto* model : {&inside, &whole}) {
      EXPECT_THAT(message_of<UsageError>([&] { checkpoint::save(folder / "a", {.model = model}, world); }), said);
      EXPECT_THAT(message_of<UsageError>([&] { saver.save(folder / "a", {.model = model}); }), said);
      EXPECT_FALSE(std::filesystem::exists(folder / "a"));
    }
    const auto own = folder / ("part-" + std::to_string(world.rank() / 2));
    checkpoint::save(own, {.model = &whole}, mesh.world());
    Contents into{.model = &whole};
    checkpoint::load(own, into, mesh.world());
  });
}

TEST(ExpertsCheckpoint, RefusesToKeepRank0sOfValuesThatHaveDriftedApart) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    Experts sharded({}), plain({});
    fully_shard(sharded, {.mesh = world, .ignored = {sharded.first->bias}});
    for (auto* model : {&sharded, &plain}) {
      checkpoint::save(folder / "same", {.model = model}, world, {.in_place = true});
      world.barrier();
      if (world.rank() == 0) std::filesystem::remove_all(folder / "same");
      world.barrier();
      {
        const torch::NoGradGuard no_grad;
        model->first->bias.add_(world.rank());
      }
      EXPECT_THAT(message_of<DisagreementError>([&] { checkpoint::save(folder / "a", {.model = model}, world); }),
                  AllOf(HasSubstr("a save would keep rank 0's values"), HasSubstr("rank 1: 'first.bias' values"),
                        HasSubstr("tessera::average_gradients")));
      EXPECT_FALSE(std::filesystem::exists(folder / "a"));
    }
    EXPECT_THAT(message_of<DisagreementError>([&] { checkpoint::full_state_dict(sharded); }), HasSubstr("'first.bias'"));
    EXPECT_THAT(message_of<DisagreementError>(
                    [&] { checkpoint::save(folder / "b", {.model = &sharded}, world, {.format = checkpoint::Format::Accelerate}); }),
                HasSubstr("'first.bias'"));
  });
}

}  // namespace
}  // namespace tessera::testing::experts_test
