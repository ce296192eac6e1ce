// A run that resumes from a checkpoint gives the same numbers as one that was not interrupted. A failed save leaves no files.
#include "tessera/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/allocations.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/picture.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::checkpoint_test {
namespace {

using checkpoint::Contents;
using checkpoint::latest;
using checkpoint::step_folder;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Expects that a run that is saved after three steps and one that is loaded from this save continue with the same bits.
void expect_resumption(int ranks, const ShardPicture& shard) {
  const Folder folder;
  with_ranks(ranks, [&](const Communicator& world) {
    const PictureRun run(world, shard);
    run.train(0, 3);
    save(folder / "run-step-3", run, {{"rank", std::to_string(world.rank())}, {"text", "größe\n\""}});
    const auto state = full_state(*run.model);
    const auto expected = run.train(3, 6);

    const PictureRun fresh(world, shard, 0.25);
    const auto notes = load(folder / "run-step-3", fresh);
    EXPECT_EQ(notes, (checkpoint::Notes{{"rank", world.rank()}, {"text", "größe\n\""}}));
    expect_same(full_state(*fresh.model), state);
    EXPECT_EQ(fresh.train(3, 6), expected) << "rank " << world.rank() << " of " << ranks;
    expect_same(full_state(*fresh.model), full_state(*run.model));
  });
}

TEST(Checkpoint, LetsARunGoOn) {
  for (const int ranks : {1, 2, 3, 7}) expect_resumption(ranks, shard_nested);
}

TEST(Checkpoint, LetsARunGoOnThatHasUsedItsModelBefore) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, 3);
    save(folder / "a", run);
    const auto expected = run.train(3, 6);
    load(folder / "a", run);  // back to the state of the save
    EXPECT_EQ(run.train(3, 6), expected);
  });
}

TEST(Checkpoint, LetsModelsGoOnThatAreNotSharded) {
  for (const int ranks : {1, 2}) expect_resumption(ranks, [](const auto&, const auto&) {});
}

TEST(Checkpoint, LetsModelsGoOnWhoseRowsReplicate) {
  expect_resumption(4, [](const auto& model, const Communicator& world) {
    fully_shard(model->conv, {.mesh = world});
    fully_shard(model, {.mesh = Mesh(world, {.replicate = 2, .shard = 2})});
  });
}

TEST(Checkpoint, LetsModelsGoOnThatAreDividedAlongAnotherDimension) {
  expect_resumption(3, [](const auto& model, const Communicator& world) {
    const auto last = [](const std::string&, const at::Tensor& parameter) {
      return parameter.dim() > 0 ? std::optional<int64_t>(-1) : std::nullopt;
    };
    fully_shard(model, {.mesh = world, .layout = Layout::Rows, .shard_dim = last});
  });
}

TEST(Checkpoint, LetsModelsGoOnThatAreShardedInPart) {
  expect_resumption(3, [](const auto& model, const Communicator& world) {
    fully_shard(model, {.mesh = world, .ignored = {model->head->bias, model->frozen->weight}});
  });
}

TEST(Checkpoint, KeepsTheGeneratorOfRandomNumbers) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    const PictureRun run(world);
    save(folder / "a", run);
    const auto drawn = torch::rand({3});
    load(folder / "a", run);
    EXPECT_TRUE(at::equal(torch::rand({3}), drawn));
  });
}

TEST(Checkpoint, OfWeightsAloneNeedsNoOptimizer) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, 1);
    save(folder / "all", run);
    checkpoint::save(folder / "weights", {.model = run.model.get()}, world);
    for (const auto* name : {"all", "weights"}) {
      const PictureRun fresh(world, shard_nested, 0.25);
      Contents into{.model = fresh.model.get()};
      checkpoint::load(folder / name, into, world);
      expect_same(full_state(*fresh.model), full_state(*run.model));
    }
    EXPECT_THAT(message_of<UsageError>([&] { load(folder / "weights", run); }),
                HasSubstr("has no optimizer, but is loaded into a tessera::optim::AdamW; load only the model"));
    optim::SGD other(run.model->conv->parameters(), {.lr = 1});
    Contents into{.model = run.model.get(), .optimizer = &other};
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load(folder / "all", into, world); }),
                HasSubstr("is of a tessera::optim::AdamW, but is loaded into a tessera::optim::SGD; take its optimizer (--optimizer), or"));
    const PictureRun second(world, shard_nested, 0.25);
    const auto before = full_state(*second.model);
    optim::AdamW smaller(second.model->conv->parameters(), {.lr = 1});
    into = {.model = second.model.get(), .optimizer = &smaller};
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load(folder / "all", into, world); }),
                AllOf(HasSubstr("the checkpoint " + (folder / "all").string()), HasSubstr("which this optimizer does not have")));
    expect_same(full_state(*second.model), before);
    const PictureRun flat(world, [](const auto& model, const Communicator& ranks) {
      fully_shard(model->conv, {.mesh = ranks, .listing = Listing::Flat});
      fully_shard(model, {.mesh = ranks, .listing = Listing::Flat});
    });
    EXPECT_THAT(message_of<UsageError>([&] { load(folder / "all", flat); }),
                AllOf(HasSubstr((folder / "all").string() +
                                " has the optimizer's state of 'conv.bias', but the model here lists 'conv.flat_param_0'"),
                      HasSubstr("--flatten-parameters")));
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::save(folder / "none", {}, world); }), HasSubstr("Contents::model"));
  });
}

TEST(Checkpoint, LetsRunsGoOnWithAnotherComputeDtype) {
  struct MixedRun {
    torch::nn::Sequential model;
    std::unique_ptr<optim::AdamW> optimizer;
    Communicator world;

    MixedRun(const Communicator& ranks, Layout layout, std::optional<at::ScalarType> dtype, double scale)
        : model(torch::nn::Linear(7, 13), torch::nn::Tanh(), torch::nn::Linear(13, 5), torch::nn::LayerNorm(std::vector<int64_t>{5})),
          world(ranks) {
      fill_with_numbers(*model, scale);
      fully_shard(model, {.mesh = world, .mixed_precision = {.param_dtype = dtype}, .layout = layout});
      optimizer = std::make_unique<optim::AdamW>(parameters(*model), optim::AdamWOptions{.lr = 0.05});
    }
    Contents contents() { return {.model = model.ptr().get(), .optimizer = optimizer.get()}; }
    void train() {
      for (int step = 0; step < 2; step++) {
        model->forward(numbers({3, 7}, step)).to(at::kFloat).pow(2).mean().backward();
        optimizer->step();
        optimizer->zero_grad();
      }
    }
  };
  for (const auto layout : {Layout::Flat, Layout::Rows, Layout::WholeParameters}) {
    for (const int ranks : {2, 3}) {
      const Folder folder;
      with_ranks(ranks, [&](const Communicator& world) {
        auto run = std::make_unique<MixedRun>(world, layout, std::nullopt, 0.5);
        int number = 0;
        for (const auto dtype : {std::optional(at::kBFloat16), std::optional<at::ScalarType>(), std::optional(at::kHalf)}) {
          run->train();
          const auto path = folder / std::to_string(number++);
          checkpoint::save(path, run->contents(), world);
          auto next = std::make_unique<MixedRun>(world, layout, dtype, 0.25);
          auto into = next->contents();
          checkpoint::load(path, into, world);
          expect_same(full_state(*next->model), full_state(*run->model));
          run = std::move(next);
        }
      });
    }
  }
}

TEST(Checkpoint, TakesThePlaceOfDifferentBeginnings) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun saved(world);
    save(folder / "a", saved);
    PictureRun other(world, shard_nested, 0.1 * (1 + world.rank()));
    Contents into{.model = other.model.get()};
    checkpoint::load(folder / "a", into, world);
    expect_same(full_state(*other.model), full_state(*saved.model));
  });
}

TEST(Checkpoint, OfAnotherModelIsRefusedAndChangesNothing) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    save(folder / "a", PictureRun(world));
    const auto refusal = [&](const std::shared_ptr<torch::nn::Module>& model) {
      fully_shard(model, {.mesh = world, .start = Start::FromRank0});
      const auto before = full_state(*model);
      Contents into{.model = model.get()};
      const auto words = message_of<UsageError>([&] { checkpoint::load(folder / "a", into, world); });
      expect_same(full_state(*model), before);
      return words;
    };
    EXPECT_THAT(refusal(seeded_net().ptr()),
                AllOf(HasSubstr("is of another model: it has no 'a.weight', 'a.bias', 'b.weight', 'b.bias', 'c.weight' and 1 more"),
                      HasSubstr("the model has no 'conv.bias', 'conv.weight', 'frozen.bias'"),
                      HasSubstr("; make the model as it was saved, or choose another checkpoint; a program can allow other names")));
    const auto wide = std::make_shared<Picture>();
    wide->frozen = wide->replace_module("frozen", torch::nn::Linear(5, 4));
    EXPECT_THAT(refusal(wide), AllOf(HasSubstr("'frozen.weight' is Float of ["), HasSubstr("in the model"), HasSubstr("'frozen.bias'")));
  });
}

TEST(Checkpoint, IsNeverWrittenOverAnother) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    save(folder / "a", run);
    const auto before = full_state(*run.model);
    run.train(0, 1);
    EXPECT_THAT(message_of<IoError>([&] { save(folder / "a", run); }),
                world.rank() == 0 ? HasSubstr("already; save under another name") : HasSubstr("rank 0 could not save"));
    load(folder / "a", run);
    expect_same(full_state(*run.model), before);
  });
}

TEST(Checkpoint, ThatFailsLeavesNothingAndTheOneBeforeIsGood) {
  const Folder folder;
  const auto prefix = folder / "run";
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, 3);
    save(step_folder(prefix, 3), run);
  });
  std::vector<double> expected[2];
  {
    const FullDisk full(100'000);  // more than rank 0 writes
    with_ranks(2, [&](const Communicator& world) {
      const PictureRun run(world);
      load(step_folder(prefix, 3), run);
      run.train(3, 4);
      const auto notes = std::string(world.rank() == 1 ? 200'000 : 0, 'x');
      EXPECT_THAT(message_of<IoError>([&] { save(step_folder(prefix, 4), run, {{"long", notes}}); }),
                  world.rank() == 1 ? HasSubstr("File too large") : HasSubstr("rank 1 could not save"));
      expected[world.rank()] = run.train(4, 6);  // the run can continue after a failed save
    });
  }
  EXPECT_FALSE(std::filesystem::exists(step_folder(prefix, 4)));
  EXPECT_FALSE(std::filesystem::exists(step_folder(prefix, 4).string() + ".part"));
  ASSERT_EQ(latest(prefix), step_folder(prefix, 3));
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun fresh(world, shard_nested, 0.25);
    load(*latest(prefix), fresh);
    fresh.train(3, 4);
    EXPECT_EQ(fresh.train(4, 6), expected[world.rank()]);
  });
}

TEST(Checkpoint, IsLoadedWithoutMemoryForASecondOptimizer) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto net = std::make_shared<torch::nn::LinearImpl>(400, 400);
    fill_with_numbers(*net);
    fully_shard(net, {.mesh = world});
    optim::AdamW optimizer(net->parameters(), {});
    const auto step = [&] {
      net->forward(torch::ones({2, 400})).sum().backward();
      optimizer.step();
    };
    step();
    Contents all{.model = net.get(), .optimizer = &optimizer};
    checkpoint::save(folder / "a", all, world);
    step();
    const Allocations taken;
    checkpoint::load(folder / "a", all, world);
    constexpr int64_t kShard = int64_t{4} * 400 * 400 / 2;  // bytes of one of a rank's two states, which go to a device one by one
    if (on_cpu()) {
      EXPECT_LT(taken.bytes(), kShard / 2);
    } else {
      EXPECT_LT(taken.peak(), 3 * kShard / 2);
    }
  });
}

TEST(Checkpoint, ClearsWhatACrashHasLeft) {
  const Folder folder;
  std::filesystem::create_directories(folder / "a.part");
  write_file(folder / "a.part/rank-0-of-5.safetensors", "torn");
  with_ranks(2, [&](const Communicator& world) { save(folder / "a", PictureRun(world)); });
  EXPECT_TRUE(checkpoint::is_complete(folder / "a"));
  EXPECT_FALSE(std::filesystem::exists(folder / "a.part"));
  EXPECT_FALSE(std::filesystem::exists(folder / "a/rank-0-of-5.safetensors"));
}

TEST(Checkpoint, TheLatestIsTheOneOfTheMostSteps) {
  const Folder folder;
  const auto prefix = folder / "new/run";
  EXPECT_EQ(latest(prefix), std::nullopt);
  EXPECT_EQ(step_folder("a/b", 500), "a/b-step-000500");
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    for (const int64_t step : {2, 1'000'000, 999'999}) save(step_folder(prefix, step), run);
    save(step_folder(folder / "new/runner", 2'000'000), run);
  });
  std::filesystem::create_directories(step_folder(prefix, 3'000'000).string() + ".part");
  std::filesystem::create_directories(folder / "new/run-step-final");
  std::filesystem::create_directories(folder / "new/run-step-99999999999999999999");
  EXPECT_EQ(latest(prefix), step_folder(prefix, 1'000'000));
  std::filesystem::remove(step_folder(prefix, 1'000'000) / "rank-0-of-2.safetensors");
  EXPECT_THAT(checkpoint::why_incomplete(step_folder(prefix, 1'000'000)),
              ::testing::Optional(AllOf(HasSubstr("run-step-1000000"), HasSubstr("'rank-0-of-2.safetensors'"))));
  EXPECT_EQ(latest(prefix), step_folder(prefix, 999'999));
  with_ranks(2, [&](const Communicator& world) { save(step_folder(prefix, 1'000'000), PictureRun(world)); });  // renames the old folder
  EXPECT_EQ(latest(prefix), step_folder(prefix, 1'000'000));
  EXPECT_TRUE(std::filesystem::exists(folder / "new/run-step-1000000.damaged/rank-1-of-2.safetensors"));
}

TEST(Checkpoint, RanksDoNotLoadDifferentOnes) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    for (const auto* name : {"a", "b"}) save(folder / name, run);
    auto into = contents(run);
    EXPECT_THAT(message_of<DisagreementError>([&] { checkpoint::load(folder / (world.rank() == 0 ? "a" : "b"), into, world); }),
                HasSubstr("ranks load different checkpoints"));
    checkpoint::load(folder / "b", into, world);
  });
}

TEST(Checkpoint, NamesAndNotesAreText) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    EXPECT_THAT(message_of<UsageError>([&] { save(folder / "a", run, {{"bytes", "\xff"}}); }), HasSubstr("the note 'bytes'"));
    EXPECT_THAT(message_of<UsageError>([&] { save("", run); }), HasSubstr("this name is empty"));
    save(folder / "with-slash/", run, {{"text", "\u00e4"}});
    EXPECT_EQ(load(folder / "with-slash", run).at("text").text(), "\u00e4");
  });
}

TEST(Checkpoint, RefusesNamesThatFilesCanNotHave) {
  struct Odd : torch::nn::Module {
    at::Tensor held;
    explicit Odd(const std::string& name) { held = register_parameter(name, at::ones({3})); }
  };
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    for (const std::string name : {"a\xff", "\xed\xa0\x80", "\xc0\xaf"}) {
      const auto odd = std::make_shared<Odd>(name);
      fully_shard(odd, {.mesh = world});
      const auto refused = [&](checkpoint::SaveOptions options, const char* file = "out") {
        EXPECT_THAT(message_of<UsageError>([&] { checkpoint::save(folder / file, {.model = odd.get()}, world, options); }),
                    AllOf(HasSubstr("the tensor '" + name + "' can't be saved"), HasSubstr("is not UTF-8")));
      };
      using checkpoint::Format;
      for (const auto format : {Format::Tessera, Format::Dcp, Format::Accelerate, Format::Hub}) refused({.format = format});
      refused({.format = Format::Accelerate, .accelerate_layout = checkpoint::AccelerateLayout::Full});
      refused({.format = Format::Torch}, "out.pt");
      refused({.format = Format::Safetensors}, "out.safetensors");
      checkpoint::AsyncSaver saver(world);
      EXPECT_THAT(message_of<UsageError>([&] { saver.save(folder / "out", {.model = odd.get()}); }), HasSubstr("is not UTF-8"));
    }
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Checkpoint, ProposesTheNewestOfARunForItsPrefix) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    for (const int step : {1, 2}) save(step_folder(folder / "run", step), run);
    EXPECT_THAT(message_of<IoError>([&] { load(folder / "run", run); }),
                HasSubstr("run; did you mean " + step_folder(folder / "run", 2).string() + "?"));
  });
}

TEST(Checkpoint, ChangesNoOptimizerWhereTheModelCanNotBeWritten) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, 2);
    save(folder / "a", run);
    run.train(2, 3);
    const auto before = checkpoint::full_optim_state_dict(run.optimizer.get(), *run.model);
    {
      const auto guard = full_params(*run.model);
      EXPECT_THROW(load(folder / "a", run), UsageError);
    }
    for (const auto& [name, state] : checkpoint::full_optim_state_dict(run.optimizer.get(), *run.model))
      expect_same(state, before.at(name));
  });
}

TEST(Checkpoint, FilesOfTwoSavesDoNotGoTogether) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    save(folder / "a", run);
    save(folder / "b", run);
    world.barrier();
    if (world.rank() == 1) {
      std::filesystem::copy_file(folder / "a/rank-1-of-2.safetensors", folder / "b/rank-1-of-2.safetensors",
                                 std::filesystem::copy_options::overwrite_existing);
    }
    world.barrier();
    EXPECT_THAT(message_of<IoError>([&] { load(folder / "b", run); }),
                world.rank() == 1 ? HasSubstr("the bytes of 'header' are not those that were written") : HasSubstr("rank 1 can't load"));
  });
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::consolidate(folder / "b", folder / "whole"); }), HasSubstr("the bytes of 'header'"));
}

}  // namespace
}  // namespace tessera::testing::checkpoint_test
