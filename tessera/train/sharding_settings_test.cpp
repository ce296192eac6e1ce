// Each key of a configuration changes how a run goes, not only how it is described.
#include "tessera/train/sharding_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/call.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/train/trainer.h"
#include "tests/testing/net.h"

namespace tessera::testing::sharding_settings_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Pairs = std::map<std::string, std::string>;

/// Observations of two steps of a model on two ranks.
struct Seen {
  ModelCounters counters = {};
  std::string description = {};
  std::vector<std::string> names = {};
  at::ScalarType output = at::kFloat;
};

Seen seen_with(const Pairs& settings) {
  Seen seen;
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(
        {.world = world, .settings = settings, .adjust_sharding = [](ShardOptions& options) { options.residence = Residence::Gathered; }});
    torch::nn::Sequential net;
    for (int i = 0; i < 4; i++) net->push_back(seeded_net()->b);
    trainer.prepare(net);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    at::Tensor output;
    for (int step = 0; step < 2; step++) {
      const auto accumulation = trainer.accumulate();
      output = call(net, torch::ones({2, 10}));
      trainer.backward(output.to(at::kFloat).sum());
      trainer.step();
    }
    if (!world.is_first()) return;
    seen = {.counters = counters(*net), .description = describe(*net), .output = output.scalar_type()};
    for (const auto& [name, parameter] : named_parameters(*net)) seen.names.push_back(name);
  });
  return seen;
}

const Pairs kWrapped = {{"fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"}, {"fsdp_transformer_layer_cls_to_wrap", "Linear"}};

Pairs with(Pairs settings, const Pairs& more) {
  settings.insert(more.begin(), more.end());
  return settings;
}

uint64_t gathers(const Pairs& settings) {
  return seen_with(settings).counters.gathers;
}

TEST(ShardingSettings, StrategiesDifferInTheirGathers) {
  const auto full = gathers(with(kWrapped, {{"fsdp_sharding_strategy", "FULL_SHARD"}}));
  const auto grad = gathers(with(kWrapped, {{"fsdp_sharding_strategy", "SHARD_GRAD_OP"}}));
  EXPECT_EQ(grad, 8U);  // four units in two steps
  EXPECT_GT(full, grad);
  EXPECT_EQ(seen_with(with(kWrapped, {{"fsdp_sharding_strategy", "NO_SHARD"}})).counters.gathered_bytes, 0U);
  EXPECT_EQ(seen_with(with(kWrapped, {{"distributed_type", "MULTI_CPU"}})).counters.gathered_bytes, 0U);
  EXPECT_EQ(gathers(with(kWrapped, {{"fsdp_sharding_strategy", "HYBRID_SHARD"}})), full);  // all ranks are on one host
  EXPECT_EQ(gathers(with(kWrapped, {{"fsdp_sharding_strategy", "HYBRID_SHARD_ZERO2"}})), grad);
  EXPECT_EQ(gathers(with(kWrapped, {{"fsdp_version", "2"}, {"fsdp_reshard_after_forward", "false"}})), grad);
  EXPECT_EQ(gathers(with(kWrapped, {{"fsdp_reshard_after_forward", "SHARD_GRAD_OP"}})), grad);
  EXPECT_EQ(gathers(with(kWrapped, {{"parallelism_config_dp_shard_size", "2"}})), full);
}

TEST(ShardingSettings, PoliciesChooseUnits) {
  const auto units = [](const Pairs& settings) {
    const auto text = seen_with(settings).description;
    const auto totals = text.find(" in buffers; ");  // in the first line after the table
    return std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(totals), '\n') - 1;  // without the heading
  };
  EXPECT_EQ(units({{"fsdp_auto_wrap_policy", "NO_WRAP"}}), 1);
  EXPECT_EQ(units(kWrapped), 4);
  EXPECT_EQ(units({{"fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"}, {"fsdp_min_num_params", "100"}}), 4);
  EXPECT_EQ(units({{"fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"}, {"fsdp_min_num_params", "1000000"}}), 1);
}

TEST(ShardingSettings, PrecisionIsThatOfTheComputation) {
  EXPECT_EQ(seen_with({{"mixed_precision", "no"}}).output, at::kFloat);
  EXPECT_EQ(seen_with({{"mixed_precision", "bf16"}}).output, at::kBFloat16);
  EXPECT_EQ(seen_with({{"mixed_precision", "fp16"}}).output, at::kHalf);
}

TEST(ShardingSettings, ForwardGathersTheNextUnitEarly) {
  const auto gathers_of_one_layer = [](const char* value) {
    uint64_t gathers = 0;
    with_ranks(2, [&](const Communicator& world) {
      const torch::NoGradGuard no_grad;
      Trainer trainer({.world = world, .settings = with(kWrapped, {{"fsdp_forward_prefetch", value}})});
      auto net = seeded_net();
      trainer.prepare(net);
      for (int pass = 0; pass < 2; pass++) net->forward(input());
      reset_counters(*net);
      net->a->forward(input());
      if (world.is_first()) gathers = counters(*net).gathers;
    });
    return gathers;
  };
  EXPECT_EQ(gathers_of_one_layer("true"), 2U);
  EXPECT_EQ(gathers_of_one_layer("false"), 1U);
}

TEST(ShardingSettings, BackwardGathersAsAsked) {
  with_ranks(1, [](const Communicator& world) {
    const auto prefetch = [&](const char* value) {
      config::Settings settings;
      settings.set("fsdp_backward_prefetch", value, config::Origin::Code, "here");
      return train::sharding_of(settings, *seeded_net(), world).options.schedule.backward_prefetch;
    };
    EXPECT_EQ(prefetch("BACKWARD_PRE"), BackwardPrefetch::Pre);
    EXPECT_EQ(prefetch("BACKWARD_POST"), BackwardPrefetch::Post);
    EXPECT_EQ(prefetch("NO_PREFETCH"), BackwardPrefetch::None);
  });
}

TEST(ShardingSettings, ParametersAreListedAsAsked) {
  EXPECT_EQ(seen_with({}).names.size(), 8U);
  EXPECT_EQ(seen_with({{"fsdp_use_orig_params", "false"}}).names, std::vector<std::string>{"flat_param_0"});
}

TEST(ShardingSettings, GradientsAreAccumulated) {
  EXPECT_EQ(seen_with({}).counters.reductions, 2U);
  EXPECT_EQ(seen_with({{"gradient_accumulation_steps", "2"}}).counters.reductions, 1U);
}

TEST(ShardingSettings, GradientsAreClipped) {
  const auto change = [](const char* limit) {
    double norm = 0;
    with_ranks(1, [&](const Communicator& world) {
      Trainer trainer({.world = world, .settings = {{"gradient_clipping", limit}}});
      auto net = seeded_net();
      trainer.prepare(net);
      optim::SGD optimizer(parameters(*net), {.lr = 1});
      trainer.prepare(optimizer);
      const auto before = trainer.get_state_dict(net);
      trainer.backward(net->forward(input()).sum());
      trainer.step();
      for (const auto& [name, value] : trainer.get_state_dict(net)) norm += (value - before.at(name)).pow(2).sum().item<double>();
    });
    return std::sqrt(norm);
  };
  EXPECT_NEAR(change("0.5"), 0.5, 1e-4);
  EXPECT_GT(change("0"), 1);
}

TEST(ShardingSettings, RanksNeedNotStartEqual) {
  const auto make = [](const char* sync) {
    with_ranks(2, [&](const Communicator& world) {
      Trainer trainer({.world = world, .settings = {{"fsdp_sync_module_states", sync}}});
      auto net = seeded_net();
      const torch::NoGradGuard no_grad;
      net->a->weight.add_(world.rank());
      trainer.prepare(net);
      net->forward(input());
    });
  };
  make("true");
  EXPECT_THAT(message_of<UsageError>([&] { make("false"); }), HasSubstr("different parameters"));
}

TEST(ShardingSettings, IgnoredModulesStayWhole) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer({.world = world, .settings = {{"fsdp_ignored_modules", "b"}}});
    auto net = seeded_net();
    trainer.prepare(net);
    EXPECT_FALSE(shard_info(net->b->weight));
    EXPECT_TRUE(shard_info(net->a->weight));
  });
}

TEST(ShardingSettings, IgnoredModulesTrainAsOthers) {
  const auto train = [](const Pairs& settings, bool torchs, const std::function<void(Trainer & trainer)>& before_step) {
    std::map<std::string, at::Tensor> state;
    with_ranks(3, [&](const Communicator& world) {
      Trainer trainer({.world = world, .settings = settings});
      auto net = seeded_net();
      if (settings.contains("fsdp_ignored_modules") && world.rank() > 0) {
        const torch::NoGradGuard no_grad;
        net->b->bias.fill_(world.rank());  // rank 0's is sent
      }
      trainer.prepare(net);
      optim::AdamW ours(parameters(*net), {.lr = 0.05});
      torch::optim::AdamW theirs(parameters(*net), torch::optim::AdamWOptions(0.05).eps(1e-8).weight_decay(0.01));
      if (torchs) {
        trainer.prepare(theirs);
      } else {
        trainer.prepare(ours);
      }
      for (int batch = 0; batch < 6; batch++) {
        const auto accumulation = trainer.accumulate();
        trainer.backward(net->forward(input(world.rank() + batch)).pow(2).mean());
        before_step(trainer);
        trainer.step();
      }
      const auto full = checkpoint::full_state_dict(*net);  // an error if ranks differ
      if (world.rank() == 0) state = full;
    });
    return state;
  };
  for (const bool torchs : {false, true}) {
    for (const char* clipping : {"0", "0.1"}) {
      const Pairs plain = {{"gradient_accumulation_steps", "2"}, {"gradient_clipping", clipping}};
      auto ignored = plain;
      ignored["fsdp_ignored_modules"] = "b";
      const auto expected = train(plain, torchs, [](Trainer&) {});
      for (const auto& before_step :
           {std::function<void(Trainer&)>([](Trainer&) {}), std::function<void(Trainer&)>([](Trainer& trainer) { trainer.grad_norm(); })}) {
        for (const auto& [name, values] : train(ignored, torchs, before_step)) {
          EXPECT_TRUE(at::allclose(values, expected.at(name), 1e-4, 1e-5)) << name;
        }
      }
    }
  }
}

TEST(ShardingSettings, UnitsAreComputedAgainInBackward) {
  with_ranks(1, [](const Communicator& world) {
    Trainer trainer({.world = world, .settings = {{"fsdp_activation_checkpointing", "true"}}});
    auto net = seeded_net();
    trainer.prepare(net);
    EXPECT_THAT(message_of<UsageError>([&] { net->forward(input()); }), HasSubstr("checkpoint"));  // plain calls can't be seen
    trainer.backward(call(net, input()).sum());
  });
}

TEST(ShardingSettings, WhatThisDeviceCanNotDoIsRefused) {
  with_ranks(2, [](const Communicator& world) {
    const auto refusal = [&](const Pairs& settings) {
      Trainer trainer({.world = world, .settings = settings});
      auto net = seeded_net();
      return message_of<ConfigError>([&] { trainer.prepare(net); });
    };
    EXPECT_THAT(refusal({{"fsdp_offload_params", "true"}}), AllOf(HasSubstr("TrainerOptions::settings"), HasSubstr("keep them in files")));
    EXPECT_THAT(refusal({{"fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"}}), HasSubstr("names no class"));
    EXPECT_THAT(refusal({{"parallelism_config_dp_shard_size", "3"}}), HasSubstr("but there are 2 ranks"));
    EXPECT_THAT(refusal({{"tessera_offload", "host"}}),
                HasSubstr("tessera_offload (TrainerOptions::settings) is host, but parameters are in the memory of the host already"));
    EXPECT_THAT(refusal({{"tessera_activation_keep", "aten::mmm"}, {"fsdp_activation_checkpointing", "true"}}),
                AllOf(HasSubstr("tessera_activation_keep (TrainerOptions::settings)"), HasSubstr("no operator 'aten::mmm'")));
    const auto refused_at_once = [&](const Pairs& settings) {
      return message_of<ConfigError>([&] { const Trainer trainer({.world = world, .settings = settings}); });
    };
    EXPECT_THAT(refused_at_once({{"tessera_log_with", "a.jsonl,b.txt"}}),
                AllOf(HasSubstr("TrainerOptions::settings: tessera_log_with: "), HasSubstr("b.txt")));
    EXPECT_THAT(refused_at_once({{"tessera_transport", "gloo"}}),
                HasSubstr("tessera_transport is gloo, but the program has given the Trainer a world over threads"));
  });
}

TEST(ShardingSettings, SayWhatRanksTalkOver) {
  const Trainer alone({.settings = {{"tessera_transport", "self"}}});
  EXPECT_EQ(alone.world().traits().name, "self");
  EXPECT_THAT(message_of<UsageError>([] { const Trainer trainer({.settings = {{"tessera_transport", "pigeon"}}}); }),
              HasSubstr("is called 'pigeon'; there are auto, self"));
  ::setenv("TESSERA_TRANSPORT", "gloo", 1);
  EXPECT_EQ(Trainer({.settings = {{"tessera_transport", "self"}}}).world().traits().name, "self") << "code wins";
  EXPECT_THAT(message_of<ConfigError>([] { const Trainer trainer; }), HasSubstr("transport gloo needs ranks"));
  ::unsetenv("TESSERA_TRANSPORT");
}

TEST(ShardingSettings, OfCodeWinOverTheResidenceOfTheEnvironment) {
  ::setenv("TESSERA_RESIDENCE", "node-shared", 1);
  const auto described = [](const Pairs& settings) {
    std::string text;
    with_ranks(2, [&](const Communicator& world) {
      Trainer trainer({.world = world, .settings = settings});
      auto net = seeded_net();
      trainer.prepare(net);
      if (world.is_first()) text = describe(*net);
    });
    return text;
  };
  EXPECT_THAT(described({}), HasSubstr("node-shared"));
  EXPECT_THAT(described({{"tessera_residence", "gathered"}}), AllOf(HasSubstr("gathered"), ::testing::Not(HasSubstr("node-shared"))));
  ::unsetenv("TESSERA_RESIDENCE");
}

}  // namespace
}  // namespace tessera::testing::sharding_settings_test
