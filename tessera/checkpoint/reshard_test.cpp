// Tests of checkpoints that are loaded on another number of ranks, or into a model that is sharded differently.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/comm/self/self.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::reshard_test {
namespace {

using checkpoint::Contents;
using checkpoint::LoadOptions;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

ShardPicture with_options(ShardOptions options, bool nested = true) {
  return [=](const std::shared_ptr<Picture>& model, const Communicator& world) {
    auto chosen = options;
    chosen.mesh = world;
    if (nested) fully_shard(model->conv, chosen);
    fully_shard(model, chosen);
  };
}

/// Returns all ways to shard a Picture that these tests try.
std::vector<ShardPicture> ways() {
  const auto self = self_world();
  return {
      shard_nested,
      with_options({.mesh = self, .layout = Layout::Rows}),
      with_options({.mesh = self, .residence = Residence::Gathered, .layout = Layout::WholeParameters}, /*nested=*/false),
      [](const auto& model, const Communicator& world) {
        const auto mesh = world.size() == 4 ? Mesh(world, {.replicate = 2, .shard = 2}) : Mesh(world);
        fully_shard(model, {.mesh = mesh, .replicated = {model->conv->bias}});
      },
      [](const auto& /*model*/, const auto& /*world*/) {},
  };
}

/// Saves a run of `ranks`, loads and saves it on `others` ranks that are sharded in another way, and expects that the run resumes from that
/// save with the same results.
void expect_way_and_back(int ranks, int others, const ShardPicture& one, const ShardPicture& other) {
  const Folder folder;
  std::vector<std::vector<double>> expected(static_cast<size_t>(ranks));
  std::map<std::string, at::Tensor> state;
  with_ranks(ranks, [&](const Communicator& world) {
    const PictureRun run(world, one);
    run.train(0, 3);
    save(folder / "there", run, {{"step", 3}});
    if (const auto full = full_state(*run.model); world.rank() == 0) state = full;
    expected[static_cast<size_t>(world.rank())] = run.train(3, 5);
  });
  with_ranks(others, [&](const Communicator& world) {
    const PictureRun run(world, other, 0.25);
    const auto notes = load(folder / "there", run);
    EXPECT_EQ(notes.at("step").as<int>(), 3);
    // A model that is not sharded has its own buffers, which are those of this rank.
    if (const auto full = full_state(*run.model); world.rank() == 0) expect_same(full, state);
    save(folder / "back", run, notes);
  });
  with_ranks(ranks, [&](const Communicator& world) {
    const PictureRun run(world, one, 0.25);
    load(folder / "back", run);
    EXPECT_EQ(run.train(3, 5), expected[static_cast<size_t>(world.rank())]) << "rank " << world.rank();
  });
}

TEST(Reshard, GoesFromAnyNumberOfRanksToAny) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int others : {1, 2, 3, 4}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, then " + std::to_string(others));
      expect_way_and_back(ranks, others, shard_nested, shard_nested);
    }
  }
}

TEST(Reshard, GoesFromAnyLayoutToAny) {
  const auto all = ways();
  for (size_t one = 0; one < all.size(); one++) {
    for (size_t other = 0; other < all.size(); other++) {
      SCOPED_TRACE("way " + std::to_string(one) + ", then way " + std::to_string(other));
      expect_way_and_back(4, 3, all[one], all[other]);
    }
  }
}

TEST(Reshard, TakesAnotherMemoryFormatAndOtherFrozenParameters) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun saved(world);
    save(folder / "a", saved);
    for (const bool thaws : {true, false}) {
      const auto model = std::make_shared<Picture>(0.25);
      if (thaws) {
        model->frozen->bias.set_requires_grad(true);
      } else {
        model->conv->weight.set_data(model->conv->weight.contiguous());
      }
      fully_shard(model, {.mesh = world});
      Contents into{.model = model.get()};
      checkpoint::load(folder / "a", into, world);
      expect_same(full_state(*model), full_state(*saved.model));
    }
  });
}

TEST(Reshard, RoundsButNotToIntegers) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun saved(world);
    save(folder / "a", saved);
    const auto narrow = std::make_shared<Picture>(0.25);
    narrow->to(at::kBFloat16);
    fully_shard(narrow, {.mesh = world});
    Contents into{.model = narrow.get()};
    checkpoint::load(folder / "a", into, world);
    EXPECT_TRUE(at::equal(full_parameter(narrow->conv->weight), full_parameter(saved.model->conv->weight).to(at::kBFloat16)));
    // Module::to() of libtorch has converted this integer buffer to floating point, too.
    checkpoint::save(folder / "b", {.model = narrow.get()}, world);
    into = contents(saved);
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load(folder / "b", into, world); }),
                HasSubstr("'norm.num_batches_tracked' is BFloat16 of [] there, but Long of [] in the model"));
  });
}

struct Scaled : torch::nn::Module {
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(3, 2));
  at::Tensor scale = register_parameter("scale", at::full({}, 0.5)), none = register_parameter("none", at::empty({0, 4}));
  at::Tensor forward(const at::Tensor& x) { return linear(x) * scale + none.sum(); }
};

TEST(Reshard, KnowsParametersOfOneValueAndOfNone) {
  const Folder folder;
  const auto run = [&](int ranks, int steps, const std::filesystem::path& from, const std::filesystem::path& to) {
    std::vector<float> result;
    with_ranks(ranks, [&](const Communicator& world) {
      const auto model = std::make_shared<Scaled>();
      fill_with_numbers(*model);
      fully_shard(model, {.mesh = world});
      optim::AdamW optimizer(parameters(*model), {.lr = 0.1});
      Contents all{.model = model.get(), .optimizer = &optimizer};
      if (!from.empty()) checkpoint::load(from, all, world);
      for (int step = 0; step < steps; step++) {
        model->forward(numbers({4, 3}, step)).pow(2).mean().backward();  // the same on all ranks
        optimizer.step();
        optimizer.zero_grad();
      }
      if (!to.empty()) checkpoint::save(to, all, world);
      const auto scale = full_parameter(model->scale).item<float>(), first = full_parameter(model->linear->weight)[0][0].item<float>();
      if (world.rank() == 0) result = {scale, first};
    });
    return result;
  };
  run(2, 2, {}, folder / "two");
  run(3, 0, folder / "two", folder / "three");
  run(1, 0, folder / "three", folder / "one");
  EXPECT_EQ(run(2, 0, folder / "one", {}), run(2, 2, {}, {}));
  EXPECT_EQ(run(2, 2, folder / "one", {}), run(2, 2, folder / "two", {}));
}

TEST(Reshard, LeavesOutWhatMayDiffer) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun saved(world);
    checkpoint::save(folder / "a", {.model = saved.model.get()}, world);
    auto other = std::make_shared<Picture>(0.25);
    other->register_module("adapter", torch::nn::Linear(2, 2));
    other->unregister_module("frozen");
    fully_shard(other, {.mesh = world, .start = Start::FromRank0});
    const auto before = full_state(*other);
    Contents into{.model = other.get()};
    const auto refused = [&](const LoadOptions& options) {
      return message_of<UsageError>([&] { checkpoint::load(folder / "a", into, world, options); });
    };
    EXPECT_THAT(refused({}), AllOf(HasSubstr("it has no 'adapter.weight', 'adapter.bias'"),
                                   HasSubstr("the model has no 'frozen.bias', 'frozen.weight'")));
    EXPECT_THAT(refused({.may_be_missing = {"adapter\\..*"}}), HasSubstr("the model has no"));
    EXPECT_THAT(refused({.may_be_missing = {"adapter"}, .may_be_unknown = {"frozen\\..*"}}), HasSubstr("it has no 'adapter"));
    EXPECT_THAT(refused({.may_be_missing = {"("}}), HasSubstr("is not a regular expression"));
    expect_same(full_state(*other), before);
    std::vector<std::string> lines;
    if (world.is_first()) {
      set_log_level(LogLevel::Info);
      set_log_sink([&](const LogRecord& record) { lines.emplace_back(record.text); });
    }
    world.barrier();
    checkpoint::load(folder / "a", into, world, {.may_be_missing = {"adapter\\..*"}, .may_be_unknown = {"frozen\\..*"}});
    world.barrier();
    if (world.is_first()) {
      set_log_sink({});
      set_log_level(LogLevel::Warning);
      EXPECT_THAT(lines, Contains(HasSubstr("has no adapter.weight, adapter.bias, which keep their values")));
      EXPECT_THAT(lines, Contains(HasSubstr("the model has no frozen.bias, frozen.weight, which are not loaded")));
    }
    const auto after = full_state(*other);
    EXPECT_TRUE(at::equal(after.at("adapter.weight"), before.at("adapter.weight")));
    EXPECT_TRUE(at::equal(after.at("conv.weight"), full_state(*saved.model).at("conv.weight")));
  });
}

TEST(Reshard, LeavesOutTheOptimizersStateOfWhatIsUnknown) {
  const Folder folder;
  const auto train = [](Net& net, optim::Optimizer& optimizer, bool with_last) {
    auto x = net->b(torch::tanh(net->a(input())));
    (with_last ? net->c(x) : x).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  for (const int ranks : {2, 3}) {
    with_ranks(ranks, [&](const Communicator& world) {
      auto net = seeded_net();
      fully_shard(net, {.mesh = world});
      optim::SGD optimizer(parameters(*net), {.lr = 0.1, .momentum = 0.9});
      train(net, optimizer, true);
      const auto place = folder / std::to_string(ranks);
      checkpoint::save(place, {.model = net.get(), .optimizer = &optimizer}, world);
      auto part = seeded_net();
      part->unregister_module("c");
      fully_shard(part, {.mesh = world});
      optim::SGD other(parameters(*part), {.lr = 0.1, .momentum = 0.9});
      Contents into{.model = part.get(), .optimizer = &other};
      EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load(place, into, world); }),
                  HasSubstr("the model has no 'c.bias', 'c.weight'"));
      checkpoint::load(place, into, world, {.may_be_unknown = {"c\\..*"}});
      train(net, optimizer, false);
      train(part, other, false);
      EXPECT_TRUE(at::equal(full_state(*part).at("a.weight"), full_state(*net).at("a.weight")));
    });
  }
}

TEST(Reshard, SharesNotesOnWhichAllRanksAgree) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) { save(folder / "a", PictureRun(world), {{"step", 7}, {"own", world.rank()}}); });
  with_ranks(3, [&](const Communicator& world) {
    const PictureRun run(world);
    EXPECT_THAT(message_of<UsageError>([&] { load(folder / "a", run); }),
                AllOf(HasSubstr("had different notes 'own', and here are 3 ranks"), HasSubstr(".notes_of_first_rank = true")));
    auto into = contents(run);
    checkpoint::load(folder / "a", into, world, {.notes_of_first_rank = true});
    EXPECT_EQ(into.notes, (checkpoint::Notes{{"step", 7}, {"own", 0}}));
  });
}

TEST(Reshard, LosesNoNoteThatOnlyOneRankHas) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    save(folder / "a", PictureRun(world), world.rank() == 1 ? checkpoint::Notes{{"own", 1}} : checkpoint::Notes());
  });
  with_ranks(1, [&](const Communicator& world) {
    EXPECT_THAT(message_of<UsageError>([&] { load(folder / "a", PictureRun(world)); }), HasSubstr("had different notes 'own'"));
  });
}

struct EightBitRun {
  torch::nn::Linear model{100, 90};  // the last block of eight-bit state is short
  std::optional<optim::AdamW8bit> optimizer;

  explicit EightBitRun(const Communicator& world, Layout layout = Layout::Flat) {
    fill_with_numbers(*model);
    fully_shard(model, {.mesh = world, .layout = layout});
    optimizer.emplace(parameters(*model), optim::AdamWOptions{.lr = 0.1});
  }
  void step(int number) {
    model->forward(numbers({4, 100}, number)).pow(2).mean().backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  Contents contents() { return {.model = model.get(), .optimizer = &*optimizer}; }
};

TEST(Reshard, StateOfEightBitsGoesToAnyNumberOfRanks) {
  if (!on_cpu()) GTEST_SKIP() << "AdamW8bit works in host memory";
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    EightBitRun run(world);
    for (int step = 0; step < 2; step++) run.step(step);
    checkpoint::save(folder / "a", run.contents(), world);
  });
  checkpoint::reshard(folder / "a", folder / "three", 3);
  const checkpoint::CatalogReader saved(checkpoint::read_catalog(folder / "a"));
  for (const auto* from : {"a", "three"}) {
    for (const int ranks : {1, 2, 3, 5}) {
      with_ranks(ranks, [&](const Communicator& world) {
        EightBitRun run(world);
        auto into = run.contents();
        checkpoint::load(folder / from, into, world);
        const auto begin = shard_info(parameters(*run.model).front())->begin;
        const auto state = run.optimizer->state(*run.model).at("weight");
        for (const std::string key : {"exp_avg", "exp_avg_sq"}) {
          const auto codes = state.at(key).flatten(), scales = state.at(key + "_scales");
          EXPECT_TRUE(at::equal(codes, saved.read("optimizer.weight." + key).flatten().narrow(0, begin, codes.numel())));
          EXPECT_TRUE(at::equal(scales, saved.read("optimizer.weight." + key + "_scales").narrow(0, begin / 256, scales.numel())));
        }
        run.step(2);
      });
    }
  }
  with_ranks(3, [&](const Communicator& world) {
    EightBitRun rows(world, Layout::Rows);
    auto into = rows.contents();
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load(folder / "a", into, world); }), HasSubstr("exp_avg_scales"));
    rows.step(0);
  });
}

}  // namespace
}  // namespace tessera::testing::reshard_test
