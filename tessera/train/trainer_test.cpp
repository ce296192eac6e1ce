// The Trainer takes the same steps as a loop that shards, accumulates and clips by hand, and goes on from what it has saved.
#include "tessera/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/save_accelerate.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/testing/folder.h"
#include "tessera/testing/net.h"

namespace tessera::testing::trainer_test {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

TrainerOptions options_for(const Communicator& world, std::map<std::string, std::string> settings = {}) {
  return {.world = world, .settings = std::move(settings)};
}

std::vector<at::Tensor> whole_values(const torch::nn::Module& model) {
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : checkpoint::full_state_dict(model)) values.push_back(tensor);
  return values;
}

void expect_equal(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); i++) EXPECT_TRUE(torch::equal(one[i], other[i])) << i;
}

at::Tensor loss_of(Net& net, int64_t number) {
  return net->forward(input(number)).pow(2).mean();
}

data::Loader numbers_loader(const Communicator& world, int64_t size) {
  return data::Loader(
      data::Sampler({.size = size, .global_batch = world.size(), .local_ranks = world.local_ranks(), .ranks = world.size()}),
      [](std::span<const int64_t> numbers) { return data::Samples{.inputs = at::tensor(numbers, at::kLong), .targets = {}}; },
      {.workers = 1});
}

TEST(Trainer, TakesTheStepsOfAHandWrittenLoop) {
  with_ranks(2, [](const Communicator& world) {
    auto by_hand = seeded_net();
    fully_shard(by_hand, {.mesh = world});
    optim::AdamW hand_optimizer(parameters(*by_hand), {.lr = 0.1});
    for (int step = 0; step < 3; step++) {
      {
        const auto held = no_sync(*by_hand);
        (loss_of(by_hand, 2 * step + world.rank()) / 2).backward();
      }
      (loss_of(by_hand, 2 * step + 1 + world.rank()) / 2).backward();
      hand_optimizer.clip_grad_norm(0.5);
      hand_optimizer.set_lr(0.1 * (step + 1) / 4);
      hand_optimizer.step();
      hand_optimizer.zero_grad();
    }

    Trainer trainer(options_for(world, {{"gradient_accumulation_steps", "2"}, {"fsdp_sync_module_states", "false"}}));
    auto net = seeded_net();
    trainer.prepare(net);
    optim::AdamW optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer, optim::LearningRate{.base = 0.1, .warmup = 4});
    for (int batch = 0; batch < 6; batch++) {
      const auto accumulation = trainer.accumulate();
      trainer.backward(loss_of(net, batch + world.rank()));
      trainer.clip_grad_norm(0.5);
      EXPECT_EQ(trainer.step(), batch % 2 == 1);
    }
    EXPECT_EQ(trainer.steps(), 3);
    expect_equal(whole_values(*net), whole_values(*by_hand));
  });
}

TEST(Trainer, EndsAnAccumulationWithTheEpoch) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer(options_for(world, {{"gradient_accumulation_steps", "2"}}));
    auto net = seeded_net();
    auto loader = numbers_loader(world, 6);
    trainer.prepare(net, loader);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    std::vector<bool> synced;
    for (const auto& batch : loader) {
      const auto accumulation = trainer.accumulate();
      synced.push_back(trainer.sync_gradients());
      trainer.backward(loss_of(net, batch.inputs[0].item<int64_t>()));
      trainer.step();
    }
    EXPECT_EQ(synced, (std::vector<bool>{false, true, true}));
  });
}

TEST(Trainer, SendsTheModelOfRank0) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer(options_for(world, {{"fsdp_cpu_ram_efficient_loading", "true"}}));
    EXPECT_EQ(trainer.needs_values(), world.is_first());
    const auto expected = seeded_net()->a->weight.clone();
    auto net = trainer.make_model([] { return seeded_net(); });
    EXPECT_EQ(net->a->weight.is_meta(), !world.is_first());
    trainer.prepare(net);
    const auto access = full_params(*net, Access::Read);
    EXPECT_TRUE(torch::equal(net->a->weight, expected));
  });
}

TEST(Trainer, GathersRowsWithoutThoseThatFillABatch) {
  with_ranks(3, [](const Communicator& world) {
    const Trainer trainer(options_for(world));
    const auto rows = at::arange(2).add(10 * world.rank());
    const data::Samples batch{.inputs = rows, .targets = {}, .repeats = world.rank() == 2 ? 1 : 0};
    EXPECT_TRUE(torch::equal(trainer.gather_for_metrics(rows, batch), at::tensor({0, 1, 10, 11, 20})));
  });
}

/// What a run has to bring along that nothing prepared holds.
struct Phase {
  int64_t number = 0;
  std::string save() const { return std::to_string(number); }
  static Phase load(const std::string& text) { return {.number = std::stoll(text)}; }
};

std::vector<at::Tensor> train(const Communicator& world, const std::string& layout, const std::filesystem::path& folder, int saves_after,
                              int loads_before) {
  Trainer trainer(options_for(world, {{"fsdp_state_dict_type", layout}}));
  auto net = seeded_net();
  auto loader = numbers_loader(world, 12);
  trainer.prepare(net, loader);
  optim::AdamW optimizer(parameters(*net), {.lr = 0.1, .beta1 = 0.8});
  trainer.prepare(optimizer, optim::LearningRate{.base = 0.1, .warmup = 8});
  Phase phase;
  trainer.register_for_checkpointing(phase);
  if (loads_before > 0) {
    trainer.load_state(folder);
    EXPECT_EQ(trainer.steps(), loads_before);
    EXPECT_EQ(loader.position().batch, loads_before);
    EXPECT_EQ(phase.number, 17);
  }
  phase.number = 17;
  for (const auto& batch : loader) {
    trainer.backward(loss_of(net, batch.inputs[0].item<int64_t>()));
    trainer.step();
    if (trainer.steps() == saves_after) trainer.save_state(folder);
  }
  return whole_values(*net);
}

TEST(Trainer, GoesOnFromWhatItHasSaved) {
  const Folder folder;
  for (const auto* layout : {"SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"}) {
    with_ranks(2, [&](const Communicator& world) {
      const auto place = folder / layout;
      const auto expected = train(world, layout, place, 3, 0);
      expect_equal(train(world, layout, place, 0, 3), expected);
    });
  }
  EXPECT_THAT(names_in(folder / "SHARDED_STATE_DICT").value(),
              UnorderedElementsAre("pytorch_model_fsdp_0", "optimizer_0", "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin",
                                   "dl_state_dict.bin", "custom_checkpoint_0.pkl"));
}

TEST(Trainer, KeepsSeveralModelsApart) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const auto run = [&](auto act) {
      Trainer trainer(options_for(world));
      auto one = seeded_net(), other = seeded_net();
      trainer.prepare(one);
      optim::SGD for_one(parameters(*one), {.lr = 0.1});
      trainer.prepare(for_one, other);
      torch::optim::AdamW for_other(parameters(*other), torch::optim::AdamWOptions(0.1));
      trainer.prepare(for_other);
      act(trainer, one, other, for_one, for_other);
      auto values = whole_values(*one);
      for (const auto& value : whole_values(*other)) values.push_back(value);
      return values;
    };
    const auto saved = run([&](Trainer& trainer, Net& one, Net& other, auto& for_one, auto& for_other) {
      trainer.backward(loss_of(one, 1));
      trainer.step(for_one);
      trainer.backward(loss_of(other, 2));
      trainer.step(for_other);
      trainer.save_state(folder / "run");
    });
    expect_equal(run([&](Trainer& trainer, Net&, Net&, auto&, auto&) { trainer.load_state(folder / "run"); }), saved);
  });
}

TEST(Trainer, ReplacesWhatItHasSaved) {
  const Folder folder;
  for (const auto* layout : {"SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"}) {
    with_ranks(2, [&](const Communicator& world) {
      Trainer trainer(options_for(world, {{"fsdp_state_dict_type", layout}}));
      auto net = seeded_net();
      trainer.prepare(net);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      for (int step = 0; step < 3; step++) {
        trainer.backward(loss_of(net, step));
        trainer.step();
        trainer.save_state(folder / layout);
      }
      const auto last = whole_values(*net);
      trainer.backward(loss_of(net, 7));
      trainer.step();
      // As a process that was killed between two renames leaves it.
      world.barrier();
      if (world.is_first()) std::filesystem::rename(folder / layout, folder / (std::string(layout) + ".old"));
      trainer.load_state(folder / layout);
      EXPECT_EQ(trainer.steps(), 3);
      expect_equal(whole_values(*net), last);
    });
    EXPECT_EQ(names_in(folder / layout)->empty(), false);
  }
  EXPECT_THAT(names_in(folder / "").value(), UnorderedElementsAre("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"));
  std::filesystem::create_directory(folder / "mine");
  write_file(folder / "mine/notes.txt", "a diary");
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.save_state(folder / "mine"); }), HasSubstr("no earlier save_state"));
  });
  EXPECT_EQ(read_file(folder / "mine/notes.txt"), "a diary");
}

TEST(Trainer, DoesNotReplaceWhatOnlyLooksLikeModels) {
  const Folder folder;
  write_file(folder / "model_best.pth", "weights");
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.save_state(folder.path()); }), HasSubstr("no earlier save_state"));
  });
  EXPECT_EQ(read_file(folder / "model_best.pth"), "weights");
}

TEST(Trainer, FindsAStateThatWasHalfReplaced) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    EXPECT_FALSE(trainer.has_state(folder / "run"));
    trainer.save_state(folder / "run");
    world.barrier({.unit = "saved"});
    if (world.is_first()) std::filesystem::rename(folder / "run", folder / "run.old");
    EXPECT_TRUE(trainer.has_state(folder / "run"));
  });
}

TEST(Trainer, GoesOnInTheMiddleOfAnEpochWithBatchesOfAnotherSize) {
  const Folder folder;
  const auto run = [&](int ranks, const auto& act) {
    with_ranks(ranks, [&](const Communicator& world) {
      Trainer trainer(options_for(world));
      auto net = seeded_net();
      auto loader = numbers_loader(world, 24);
      trainer.prepare(net, loader);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      act(trainer, loader);
    });
  };
  run(4, [&](Trainer& trainer, data::Loader& loader) {
    for (int batch = 0; batch < 3; batch++) loader.next();
    trainer.save_state(folder / "run");
  });
  run(2, [&](Trainer& trainer, data::Loader& loader) {
    trainer.load_state(folder / "run");
    EXPECT_EQ(loader.position().batch, 6);
  });
  run(5, [&](Trainer& trainer, data::Loader&) {
    EXPECT_THAT(message_of<UsageError>([&] { trainer.load_state(folder / "run"); }), HasSubstr("after 12 samples of an epoch"));
  });
}

// An epoch that is over stays so, whatever its last batch was filled with, and a schedule over the data is where it was.
TEST(Trainer, GoesOnAfterAnEpochWithBatchesOfAnotherSize) {
  const Folder folder;
  const auto run = [&](int ranks, const auto& act) {
    with_ranks(ranks, [&](const Communicator& world) {
      Trainer trainer(options_for(world));
      auto net = seeded_net();
      data::Loader loader(data::Sampler({.size = 10,
                                         .global_batch = world.size(),
                                         .local_ranks = world.local_ranks(),
                                         .ranks = world.size(),
                                         .tail = data::Tail::Fill}),
                          [](std::span<const int64_t>) { return data::Samples{.inputs = at::zeros({1}), .targets = {}}; }, {.workers = 0});
      trainer.prepare(net, loader);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      act(trainer, loader, net);
    });
  };
  run(4, [&](Trainer& trainer, data::Loader& loader, Net& net) {
    while (loader.position().batch < loader.batches()) {
      loader.next();
      trainer.backward(loss_of(net, 1));
      trainer.step();
    }
    EXPECT_EQ(trainer.steps(), 3);
    trainer.save_state(folder / "run");
  });
  for (const int ranks : {2, 5}) {
    run(ranks, [&](Trainer& trainer, data::Loader& loader, Net&) {
      trainer.load_state(folder / "run");
      EXPECT_EQ(loader.position(), (data::Position{.epoch = 0, .batch = loader.batches()}));
      EXPECT_EQ(trainer.steps(), ranks == 2 ? 6 : 2);
    });
  }
}

TEST(Trainer, AccumulatesWhereAnotherLoaderIsAtItsEnd) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer(options_for(world, {{"gradient_accumulation_steps", "2"}}));
    auto net = seeded_net();
    auto evaluation = numbers_loader(world, 4), loader = numbers_loader(world, 10);
    trainer.prepare(net, loader, evaluation);
    for (int batch = 0; batch < evaluation.batches(); batch++) evaluation.next();
    std::vector<bool> ends;
    while (loader.next()) {
      const auto accumulation = trainer.accumulate();
      ends.push_back(trainer.sync_gradients());
    }
    EXPECT_EQ(ends, std::vector<bool>({false, true, false, true, true}));
  });
}

TEST(Trainer, LimitsTheGradientsOfEachOptimizer) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer(options_for(world, {{"gradient_clipping", "0.001"}}));
    auto one = seeded_net(), other = seeded_net();
    trainer.prepare(one);
    optim::SGD for_one(parameters(*one), {.lr = 1});
    trainer.prepare(for_one, other);
    optim::SGD for_other(parameters(*other), {.lr = 1});
    trainer.prepare(for_other);
    const auto change = [](const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
      double squares = 0;
      for (size_t i = 0; i < from.size(); i++) squares += (from[i] - to[i]).pow(2).sum().item<double>();
      return std::sqrt(squares);
    };
    trainer.backward(loss_of(one, 1));
    trainer.clip_grad_norm(0.01);  // which has no gradients of the other one yet
    const auto one_before = whole_values(*one), other_before = whole_values(*other);
    trainer.step(for_one);
    trainer.backward(loss_of(other, 2));
    trainer.step(for_other);
    EXPECT_NEAR(change(one_before, whole_values(*one)), 0.01, 1e-4);
    EXPECT_NEAR(change(other_before, whole_values(*other)), 0.001, 1e-5);
    // What was limited and then dropped says nothing of the next gradients.
    trainer.backward(loss_of(one, 1));
    trainer.clip_grad_norm(0.01);
    for_one.zero_grad();
    const auto before = whole_values(*one);
    trainer.backward(loss_of(one, 1));
    trainer.step(for_one);
    EXPECT_NEAR(change(before, whole_values(*one)), 0.001, 1e-5);
  });
}

TEST(Trainer, TakesWhatItCanOfAccelerate) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    // Under the names of Accelerate, whose scheduler counts a step for each process.
    checkpoint::Contents contents{
        .model = net.get(), .optimizer = &optimizer, .notes = {{"step", 0}, {"scheduler.last_epoch", 12}, {"dl_state_dict.other", 1}}};
    checkpoint::save_accelerate(folder / "run", contents, world, {.settings = {{"lr", 0.1}}});
    auto loader = numbers_loader(world, 12);
    trainer.prepare(loader);
    trainer.load_state(folder / "run");
    EXPECT_EQ(trainer.steps(), 6);
    EXPECT_EQ(loader.position(), data::Position());
    Phase phase;
    trainer.register_for_checkpointing(phase);
    const auto before = whole_values(*net);
    trainer.backward(loss_of(net, 1));
    trainer.step();
    const auto stepped = whole_values(*net);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.load_state(folder / "run"); }), HasSubstr("has registered 1 object"));
    expect_equal(whole_values(*net), stepped);  // nothing was loaded
    EXPECT_FALSE(torch::equal(before.front(), stepped.front()));
  });
}

// torch scales both losses alike, and changes the scale after both steps.
TEST(Trainer, ScalesForSeveralOptimizers) {
  with_ranks(2, [](const Communicator& world) {
    const auto small = [](Net& net, int64_t step) {
      return net->forward(input(step)).to(at::kFloat).pow(2).mean() * 0.01;  // so that nothing overflows
    };
    const auto run = [&](const std::string& precision, bool one_by_one, double clipping) {
      Trainer trainer(options_for(world, {{"mixed_precision", precision}, {"gradient_clipping", std::to_string(clipping)}}));
      auto one = seeded_net(), other = seeded_net();
      trainer.prepare(one);
      optim::SGD for_one(parameters(*one), {.lr = 10});
      trainer.prepare(for_one, other);
      torch::optim::SGD for_other(parameters(*other), 10);
      trainer.prepare(for_other);
      for (int step = 0; step < 3; step++) {
        if (one_by_one) {
          trainer.backward(small(one, step));
          EXPECT_TRUE(trainer.step(for_one));
          trainer.backward(small(other, step));
          EXPECT_TRUE(trainer.step(for_other));
        } else {
          trainer.backward(small(one, step) + small(other, step));
          EXPECT_TRUE(trainer.step(for_one));
          EXPECT_TRUE(trainer.step(for_other));
        }
      }
      auto values = whole_values(*one);
      for (const auto& value : whole_values(*other)) values.push_back(value);
      return values;
    };
    for (const double clipping : {0.0, 0.0005}) {
      const auto expected = run("no", true, clipping);
      for (const bool one_by_one : {true, false}) {
        const auto found = run("fp16", one_by_one, clipping);
        for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(at::allclose(found[i], expected[i], 2e-2, 2e-3)) << i;
      }
    }
  });
}

TEST(Trainer, SkipsAStepThatOverflows) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer(options_for(world, {{"mixed_precision", "fp16"}}));
    auto net = seeded_net();
    trainer.prepare(net);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    trainer.backward(loss_of(net, 1) * 1e6);
    trainer.clip_grad_norm(1);
    EXPECT_FALSE(trainer.step());
    EXPECT_EQ(trainer.steps(), 0);
    int steps = 0;
    while (!trainer.step() && steps++ < 30) trainer.backward(loss_of(net, 1));
    trainer.backward(loss_of(net, 1));
    EXPECT_TRUE(trainer.step());
  });
}

TEST(Trainer, SaysWhereAnAccumulationIsMissing) {
  with_ranks(2, [](const Communicator& world) {
    const Folder folder;
    Trainer trainer(options_for(world, {{"gradient_accumulation_steps", "4"}}));
    auto net = seeded_net();
    trainer.prepare(net);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.backward(loss_of(net, 1)); }), HasSubstr("gradient_accumulation_steps is 4"));
    {
      const auto accumulation = trainer.accumulate();
      trainer.backward(loss_of(net, 1));
      EXPECT_FALSE(trainer.step());
    }
    EXPECT_THAT(message_of<UsageError>([&] { trainer.backward(loss_of(net, 1)); }), HasSubstr("outside of an accumulation"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.save_state(folder / "run"); }), HasSubstr("in the middle of an accumulation"));
  });
}

TEST(Trainer, KnowsItsProcesses) {
  with_ranks(3, [](const Communicator& world) {
    const Trainer trainer(options_for(world));
    EXPECT_EQ(trainer.num_processes(), 3);
    EXPECT_EQ(trainer.is_main_process(), world.rank() == 0);
    EXPECT_EQ(trainer.is_local_main_process(), world.rank() == 0);  // all are on one host
    trainer.wait_for_everyone();
    const auto net = seeded_net();
    EXPECT_EQ(&Trainer::unwrap(net), &net);
    auto loader = numbers_loader(world, 9);
    Trainer::skip_first_batches(loader, 2);
    EXPECT_EQ(loader.position().batch, 2);
    EXPECT_TRUE(loader.next());
    EXPECT_FALSE(loader.next());
  });
}

TEST(Trainer, RefusesWhatComesInTheWrongOrder) {
  with_ranks(1, [](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    optim::SGD early(net->parameters(), {.lr = 0.1});
    EXPECT_THAT(message_of<UsageError>([&] { trainer.prepare(early); }), HasSubstr("an optimizer comes after its model"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.prepare(optim::LearningRate{}); }), HasSubstr("before an optimizer"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.step(); }), HasSubstr("was given no optimizer"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.save_state("nowhere"); }), HasSubstr("before prepare()"));
    trainer.prepare(net);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.prepare(early); }), HasSubstr("then make the optimizer"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.load_state(""); }), HasSubstr("an empty path"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.save_state(""); }), HasSubstr("an empty path"));
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.prepare(optimizer); }), HasSubstr("the same optimizer twice"));
  });
}

TEST(Trainer, MovesATorchOptimizerThatWasMadeBefore) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    trainer.prepare(net, optimizer,
                    optim::LearningRate{.base = 0.1, .shape = optim::LearningRate::Shape::Steps, .factor = 0.5, .every = 1});
    const auto before = whole_values(*net);
    for (int step = 0; step < 2; step++) {
      trainer.backward(loss_of(net, step));
      trainer.step();
    }
    EXPECT_FALSE(torch::equal(whole_values(*net).front(), before.front()));
    EXPECT_DOUBLE_EQ(optimizer.param_groups().front().options().get_lr(), 0.05);
  });
}

TEST(Trainer, NamesASettingThatRanksDoNotShare) {
  with_ranks(2, [](const Communicator& world) {
    const auto message = message_of<DisagreementError>(
        [&] { const Trainer trainer(options_for(world, {{"gradient_clipping", world.is_first() ? "1" : "2"}})); });
    EXPECT_THAT(message, HasSubstr("different settings"));
    EXPECT_THAT(message, HasSubstr("rank 0: gradient_clipping 1; rank 1: gradient_clipping 2"));
  });
}

TEST(Trainer, DoesNotTakeADamagedFileForAMissingOne) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    auto loader = numbers_loader(world, 8);
    trainer.prepare(net, loader);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    Phase phase;
    trainer.register_for_checkpointing(phase);
    trainer.save_state(folder / "run");
    for (const auto* name : {"scheduler.bin", "dl_state_dict.bin", "custom_checkpoint_0.pkl"}) {
      const auto file = folder / "run" / name;
      if (world.is_first()) {
        std::filesystem::copy_file(file, folder / name);
        std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
      }
      world.barrier({.unit = "damage"});
      EXPECT_THAT(message_of<IoError>([&] { trainer.load_state(folder / "run"); }), HasSubstr(std::string(name) + " is damaged"));
      world.barrier({.unit = "mended"});
      if (world.is_first()) std::filesystem::rename(folder / name, file);
      world.barrier({.unit = "mended"});
      trainer.load_state(folder / "run");
    }
  });
}

TEST(Trainer, StepsASchedulerOfTorch) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto by_hand = seeded_net();
    torch::optim::SGD hand_optimizer(by_hand->parameters(), 0.1);
    torch::optim::StepLR hand_scheduler(hand_optimizer, 2, 0.5);
    for (int step = 0; step < 6; step++) {
      loss_of(by_hand, step).backward();
      hand_optimizer.step();
      hand_scheduler.step();
      hand_optimizer.zero_grad();
    }

    for (int part = 0; part < 2; part++) {
      Trainer trainer(options_for(world));
      auto net = seeded_net();
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      torch::optim::StepLR scheduler(optimizer, 2, 0.5);
      trainer.prepare(net, optimizer, scheduler);
      EXPECT_THAT(message_of<UsageError>([&] { trainer.prepare(optim::LearningRate{.base = 1}); }), HasSubstr("two learning rates"));
      if (part == 1) trainer.load_state(folder / "run");
      for (int step = 3 * part; step < 3 * (part + 1); step++) {
        trainer.backward(loss_of(net, step));
        trainer.step();
      }
      if (part == 0) {
        trainer.save_state(folder / "run");
        trainer.backward(loss_of(net, 0));
        trainer.step();
        EXPECT_THAT(message_of<UsageError>([&] { trainer.load_state(folder / "run"); }), HasSubstr("has taken 4 steps"));
        continue;
      }
      EXPECT_EQ(optimizer.param_groups().front().options().get_lr(), hand_optimizer.param_groups().front().options().get_lr());
      const auto values = whole_values(*net), expected = whole_values(*by_hand);
      for (size_t i = 0; i < values.size(); i++) EXPECT_TRUE(torch::allclose(values[i], expected[i])) << i;
    }
  });
}

}  // namespace
}  // namespace tessera::testing::trainer_test
