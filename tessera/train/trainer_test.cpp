// The Trainer takes the same steps as a loop that shards, accumulates and clips by hand, and resumes from what it has saved.
#include "tessera/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/trained.h"

namespace tessera::testing::trainer_test {
namespace {

using ::testing::HasSubstr;

TEST(Trainer, TakesTheStepsOfAHandWrittenLoop) {
  with_ranks(2, [](const Communicator& world) {
    auto by_hand = seeded_net();
    fully_shard(by_hand, {.mesh = world});
    optim::AdamW hand_optimizer(parameters(*by_hand), {.lr = 0.1});
    for (int step = 0; step < 3; step++) {
      {
        const auto held = no_sync(*by_hand);
        (squared_output(by_hand, 2 * step + world.rank()) / 2).backward();
      }
      (squared_output(by_hand, 2 * step + 1 + world.rank()) / 2).backward();
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
      trainer.backward(squared_output(net, batch + world.rank()));
      trainer.clip_grad_norm(0.5);
      EXPECT_EQ(trainer.step(), batch % 2 == 1);
    }
    EXPECT_EQ(trainer.steps(), 3);
    expect_same(whole_values(*net), whole_values(*by_hand));
  });
}

TEST(Trainer, NamesTheSettingsThatCantBe) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer(options_for(world, {{"tessera_reshard_ranks", "3"}}));
    auto net = seeded_net();
    EXPECT_THAT(message_of<UsageError>([&] { trainer.prepare(net); }),
                HasSubstr("tessera_reshard_ranks 3 (TrainerOptions::settings): reshard_after_forward"));
  });
  EXPECT_THAT(message_of<UsageError>([] { Trainer({.settings = {{"tessera_transport", "nonsense"}}}); }),
              HasSubstr("tessera_transport nonsense (TrainerOptions::settings): "));
}

TEST(Trainer, TrainsOnTheCpuIfItIsTold) {
  ASSERT_EQ(::setenv("TESSERA_DEVICE", "cuda:99", 1), 0);
  EXPECT_TRUE(Trainer({.settings = {{"use_cpu", "true"}}}).world().traits().device.is_cpu());
  EXPECT_ANY_THROW(Trainer());
  ::unsetenv("TESSERA_DEVICE");
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
      trainer.backward(squared_output(net, batch.inputs[0].item<int64_t>()));
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
    trainer.backward(squared_output(one, 1));
    trainer.clip_grad_norm(0.01);  // while the other optimizer has no gradients yet
    const auto one_before = whole_values(*one), other_before = whole_values(*other);
    trainer.step(for_one);
    trainer.backward(squared_output(other, 2));
    trainer.step(for_other);
    EXPECT_NEAR(change(one_before, whole_values(*one)), 0.01, 1e-4);
    EXPECT_NEAR(change(other_before, whole_values(*other)), 0.001, 1e-5);
    // A limit on gradients that are dropped does not count for the next ones.
    trainer.backward(squared_output(one, 1));
    trainer.clip_grad_norm(0.01);
    for_one.zero_grad();
    const auto before = whole_values(*one);
    trainer.backward(squared_output(one, 1));
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
    checkpoint::save(folder / "run", contents, world, {.format = checkpoint::Format::Accelerate});
    auto loader = numbers_loader(world, 12);
    trainer.prepare(loader);
    trainer.load_state(folder / "run");
    EXPECT_EQ(trainer.steps(), 6);
    EXPECT_EQ(loader.position(), data::Position());
    Phase phase;
    trainer.register_for_checkpointing(phase);
    const auto before = whole_values(*net);
    trainer.backward(squared_output(net, 1));
    trainer.step();
    const auto stepped = whole_values(*net);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.load_state(folder / "run"); }), HasSubstr("has registered 1 object"));
    expect_same(whole_values(*net), stepped);  // nothing was loaded
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
    trainer.backward(squared_output(net, 1) * 1e6);
    trainer.clip_grad_norm(1);
    EXPECT_FALSE(trainer.step());
    EXPECT_EQ(trainer.steps(), 0);
    int steps = 0;
    do {
      trainer.backward(squared_output(net, 1));
    } while (!trainer.step() && steps++ < 30);
    trainer.backward(squared_output(net, 1));
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
    EXPECT_THAT(message_of<UsageError>([&] { trainer.backward(squared_output(net, 1)); }), HasSubstr("gradient_accumulation_steps is 4"));
    {
      const auto accumulation = trainer.accumulate();
      trainer.backward(squared_output(net, 1));
      EXPECT_FALSE(trainer.step());
    }
    EXPECT_THAT(message_of<UsageError>([&] { trainer.backward(squared_output(net, 1)); }), HasSubstr("outside of an accumulation"));
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
      trainer.backward(squared_output(net, step));
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

TEST(Trainer, StepsASchedulerOfTorch) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto by_hand = seeded_net();
    torch::optim::SGD hand_optimizer(by_hand->parameters(), 0.1);
    torch::optim::StepLR hand_scheduler(hand_optimizer, 2, 0.5);
    for (int step = 0; step < 6; step++) {
      squared_output(by_hand, step).backward();
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
        trainer.backward(squared_output(net, step));
        trainer.step();
      }
      if (part == 0) {
        trainer.save_state(folder / "run");
        trainer.backward(squared_output(net, 0));
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
