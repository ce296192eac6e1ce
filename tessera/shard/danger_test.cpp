// What could go wrong with parameters that come and go: right, or refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/model.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/unit.h"
#include "tessera/testing/net.h"

namespace tessera::testing {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

// --- Gathers, reductions, memory ---

TEST(Cost, OfAStepIsTheFormula) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    for (int step = 0; step < 4; step++) {
      reset_counters(*net);
      net(input()).sum().backward();
      if (step == 0) continue;  // the order of use is not known yet
      for (const auto& unit : units(*net)) {
        EXPECT_EQ(unit->counters().reductions, 1) << unit->name();
        // One in forward; one more in backward if it was freed and its weight is needed. The first layer's weight is not: its input
        // needs no gradient. The last one is still whole when backward begins.
        EXPECT_EQ(unit->counters().gathers, unit->name() == "b" ? 2 : 1) << unit->name() << " step " << step;
      }
      EXPECT_EQ(counters(*net).misses, 0);
    }
    EXPECT_THAT(describe(*net), ::testing::AllOf(HasSubstr("\na "), HasSubstr("\nb "), HasSubstr("peak of whole units")));
  });
}

TEST(Cost, IsHiddenByBringingInTheNextUnitEarly) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    const torch::NoGradGuard no_grad;
    for (int pass = 0; pass < 2; pass++) net(input());
    const auto gathers = [&](size_t unit) { return units(*net)[unit]->counters().gathers; };
    net->a(input());
    EXPECT_EQ(gathers(1), 3);  // the next one of the learnt order comes along
    net->b(at::ones({1, 10}));
    EXPECT_EQ(gathers(1), 3);
    EXPECT_EQ(gathers(2), 3);
    net->a(input());  // but something else is used: right all the same
    EXPECT_EQ(counters(*net).misses, 1);
    EXPECT_TRUE(at::equal(net(input()), seeded_net()->forward(input())));
  });
  // A model may die, and its world with it, while a unit is on its way.
  run_world({.transport = "threads", .ranks = 2}, [](Communicator world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    const torch::NoGradGuard no_grad;
    for (int pass = 0; pass < 2; pass++) net(input());
    net->a(input());
  });
}

TEST(Memory, OfWholeUnitsIsBoundedAlsoWithoutGradients) {
  with_ranks(2, [](const Communicator& world) {
    nn::Sequential layers;
    for (int i = 0; i < 8; i++) {
      nn::Linear layer(16, 16);
      for (auto& parameter : layer->parameters()) parameter.set_requires_grad(i % 2 == 0);  // every second one is frozen
      fully_shard(layer, {.mesh = world, .start = Start::FromRank0});
      layers->push_back(layer);
    }
    fully_shard(layers, {.mesh = world});
    const auto one = units(*layers).front()->whole_bytes();
    for (int step = 0; step < 3; step++) layers->forward(at::ones({2, 16})).sum().backward();
    EXPECT_LE(counters(*layers).peak_whole_bytes, 3 * one);
    const torch::NoGradGuard no_grad;
    for (int pass = 0; pass < 3; pass++) layers->forward(at::ones({2, 16}));
    EXPECT_LE(counters(*layers).peak_whole_bytes, 3 * one);
    for (const auto& unit : units(*layers)) EXPECT_LE(unit->counters().gathers, 12) << unit->name();
  });
}

TEST(Memory, OfAModuleIsFreedBeforeFullyShardReturns) {
  with_ranks(2, [](const Communicator& world) {
    nn::Linear layer(64, 64);
    const c10::weak_intrusive_ptr<c10::StorageImpl> before(layer->weight.storage().getWeakStorageImpl());
    fully_shard(layer, {.mesh = world, .start = Start::FromRank0});
    EXPECT_TRUE(before.expired());
    // And nothing of it outlives the module.
    const std::weak_ptr<Unit> unit = units(*layer).front();
    layer(at::ones({1, 64})).sum().backward();
    layer = nullptr;
    EXPECT_TRUE(unit.expired());
  });
}

TEST(Memory, OfADeadModuleMayBeTakenByAnother) {
  with_ranks(1, [](const Communicator& world) {
    std::vector<at::Tensor> graphs;  // keep the units
    for (int i = 0; i < 20; i++) {
      nn::Linear layer(4, 4);
      fully_shard(layer, {.mesh = world});
      graphs.push_back(layer(at::ones({2, 4})).sum());
    }
    for (auto& graph : graphs) graph.backward();
  });
}

// --- Things that must come out right ---

TEST(Gradients, AreThoseThatUsersOfShardsExpect) {
  with_ranks(3, [](const Communicator& world) {
    auto whole = seeded_net();
    auto net = sharded_net(world);
    const auto shards = parameters(*net);
    const auto originals = whole->parameters();
    const auto expect_same = [&](double factor) {
      for (size_t i = 0; i < shards.size(); i++) {
        EXPECT_TRUE(at::allclose(full_grad(shards[i]), originals[i].grad() * factor, 1e-5, 1e-6)) << i;
      }
    };
    whole->forward(input()).pow(2).sum().backward();
    // Accumulation over several passes, two forwards before one backward, a graph used twice.
    net(input()).pow(2).sum().backward();
    expect_same(1);
    net(input()).pow(2).sum().backward();
    expect_same(2);
    net->zero_grad();
    (net(input()).pow(2).sum() + net(input()).pow(2).sum()).backward();
    expect_same(2);
    net->zero_grad();
    const auto loss = net(input()).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    expect_same(2);
    net->zero_grad();

    const auto gradients = torch::autograd::grad({net(input()).pow(2).sum()}, shards);
    ASSERT_EQ(gradients.size(), shards.size());
    EXPECT_EQ(gradients[0].sizes(), shards[0].sizes());
    EXPECT_FALSE(shards[0].grad().defined());

    int calls = 0;
    auto hooked = shards[0];
    hooked.register_hook([&calls](const at::Tensor& gradient) {
      calls++;
      return gradient * 2;
    });
    net(input()).pow(2).sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(at::allclose(full_grad(shards[0]), originals[0].grad() * 2, 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(full_grad(shards[1]), originals[1].grad(), 1e-5, 1e-6));
  });
}

TEST(Gradients, OfInputsMayBeDifferentiatedAgain) {
  with_ranks(2, [](const Communicator& world) {
    const auto penalty = [](Net& net) {
      auto x = input().set_requires_grad(true);
      const auto energy = net(x).pow(2).sum();
      const auto forces = torch::autograd::grad({energy}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      return forces.pow(2).sum() + energy;
    };
    auto whole = seeded_net();
    penalty(whole).backward();
    auto net = sharded_net(world);
    penalty(net).backward();
    const auto shards = parameters(*net);
    for (size_t i = 0; i < shards.size(); i++) {
      EXPECT_TRUE(at::allclose(full_grad(shards[i]), whole->parameters()[i].grad(), 1e-4, 1e-5)) << i;
    }
    EXPECT_THAT(message_of<UsageError>([&] { net(input()).pow(2).sum().backward({}, true, /*create_graph=*/true); }),
                HasSubstr("create_graph"));
  });
}

TEST(Passes, WithoutGradientsGiveTheSameNumbers) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto expected = seeded_net()->forward(input());
    {
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(net(input()), expected));
    }
    {
      const c10::InferenceMode inference;
      EXPECT_TRUE(at::equal(net(input()), expected));
    }
    net->eval();
    EXPECT_TRUE(at::equal(net(input()), expected));
  });
}

TEST(Passes, OfTwoModelsMayInterleave) {
  with_ranks(2, [](const Communicator& world) {
    auto first = sharded_net(world), second = sharded_net(world);
    auto whole = seeded_net();
    const auto mixed = [&](Net& a, Net& b) { return (a(input()) * b->c(torch::tanh(a->b(torch::tanh(b->a(input())))))).sum(); };
    auto reference = seeded_net();
    mixed(whole, reference).backward();
    mixed(first, second).backward();
    EXPECT_TRUE(at::allclose(full_grad(parameters(*first)[2]), whole->b->weight.grad(), 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(full_grad(parameters(*second)[4]), reference->c->weight.grad(), 1e-5, 1e-6));
  });
}

TEST(Passes, GoOnAfterAnException) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto expected = net(input()).detach();
    EXPECT_ANY_THROW(net(at::ones({3, 5})));  // a shape that does not fit
    auto x = input().set_requires_grad(true);
    x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in the middle of backward"); });
    EXPECT_ANY_THROW(net(x).sum().backward());
    net->zero_grad();
    EXPECT_TRUE(at::equal(net(input()), expected));
    net(input()).sum().backward();
  });
}

TEST(Freezing, ActsBetweenSteps) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    set_requires_grad(*net->b, Training::Frozen);
    net(input()).sum().backward();
    EXPECT_FALSE(parameters(*net)[2].grad().defined());
    EXPECT_TRUE(parameters(*net)[0].grad().defined());
    set_requires_grad(*net->b, Training::Trained);
    net(input()).sum().backward();
    EXPECT_TRUE(parameters(*net)[2].grad().defined());
  });
}

// --- Whole parameters ---

TEST(FullParams, CanBeReadAndWritten) {
  with_ranks(3, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto original = seeded_net();
    {
      const auto guard = full_params(*net);
      EXPECT_EQ(net->a->weight.data_ptr<float>()[3], original->a->weight.data_ptr<float>()[3]);
    }
    {
      const auto guard = full_params(*net, Access::Write);
      const torch::NoGradGuard no_grad;
      net->a->weight.fill_(0.5);
    }
    EXPECT_TRUE(at::equal(full_parameter(parameters(*net)[0]), at::full({10, 6}, 0.5)));
    EXPECT_TRUE(at::equal(full_parameter(parameters(*net)[1]), original->a->bias));
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(net->a(at::ones({1, 6})), at::linear(at::ones({1, 6}), at::full({10, 6}, 0.5), original->a->bias)));
  });
}

TEST(FullState, IsThatOfTheUnshardedModel) {
  with_ranks(3, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto original = seeded_net();
    const auto state = full_state(*net);
    EXPECT_EQ(state.size(), 6);
    for (const auto& item : original->named_parameters()) EXPECT_TRUE(at::equal(state.at(item.key()), item.value())) << item.key();
    EXPECT_EQ(full_state(*net, Ranks::First).size(), world.rank() == 0 ? 6 : 0);
    EXPECT_TRUE(at::equal(full_state(*net, "b.bias"), original->b->bias));
    EXPECT_EQ(full_state(*net, "b.bias", Ranks::First).defined(), world.rank() == 0);
    EXPECT_THAT(message_of<UsageError>([&] { (void)full_state(*net, "b.bais"); }), HasSubstr("'b.bais'"));
  });
}

TEST(FlatListing, ShowsAVectorOfWhatTrainsAndOneOfWhatDoesNot) {
  with_ranks(3, [](const Communicator& world) {
    auto net = seeded_net();
    net->b->bias.set_requires_grad(false);
    fully_shard(net->b, {.mesh = world, .listing = Listing::Flat});
    fully_shard(net, {.mesh = world, .listing = Listing::Flat});
    const auto shards = net->named_parameters();
    ASSERT_EQ(shards.keys(), (std::vector<std::string>{"flat_param_0", "b.flat_param_0", "b.flat_param_1"}));
    EXPECT_TRUE(shards["b.flat_param_0"].requires_grad());
    EXPECT_FALSE(shards["b.flat_param_1"].requires_grad());
    const auto info = shard_info(shards["b.flat_param_0"]);
    EXPECT_EQ(info->name, "b.flat_param_0");
    EXPECT_EQ(info->numel * 3, info->shape[0]);
    EXPECT_EQ(info->begin, info->numel * world.rank());

    auto original = seeded_net();
    for (const auto& [name, whole] : full_state(*net)) EXPECT_TRUE(at::equal(whole, original->named_parameters()[name])) << name;
    EXPECT_TRUE(at::equal(full_state(*net, "b.bias"), original->b->bias));

    original->b->bias.set_requires_grad(false);
    original(input()).pow(2).sum().backward();
    net(input()).pow(2).sum().backward();
    EXPECT_NEAR(grad_norm(parameters(*net)).item<double>(), nn::utils::clip_grad_norm_(original->parameters(), 1e9), 1e-4);
    EXPECT_EQ(full_grad(shards["flat_param_0"]).numel(), shards["flat_param_0"].numel() * 3);
    EXPECT_THAT(message_of<UsageError>([&] {
                  nn::Linear one(2, 2), two(2, 2);
                  const std::vector<std::shared_ptr<nn::Module>> list = {one.ptr(), two.ptr()};
                  fully_shard(list, {.mesh = world, .listing = Listing::Flat});
                }),
                HasSubstr("one by one"));
  });
}

TEST(Shards, KnowWhatTheyAreAPartOf) {
  with_ranks(3, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    const auto shards = parameters(*net);
    const auto info = shard_info(shards[0]);
    ASSERT_TRUE(info);
    EXPECT_EQ(info->unit, "a");
    EXPECT_EQ(info->name, "a.weight");
    EXPECT_EQ(info->shape, (std::vector<int64_t>{10, 6}));
    EXPECT_EQ(info->numel, shards[0].numel());
    EXPECT_EQ(shards[0].dim(), 2);
    EXPECT_EQ(net->named_parameters().size(), 6);
    auto total = at::full({1}, shards[0].numel(), at::kLong);
    world.all_reduce(total).wait();
    EXPECT_EQ(total.item<int64_t>(), 60);
    EXPECT_FALSE(shard_info(at::ones({2})));
  });
}

TEST(Norm, IsThatOfAllRanks) {
  for (const int ranks : {1, 2, 7}) {
    with_ranks(ranks, [](const Communicator& world) {
      auto net = sharded_net(world);
      auto whole = seeded_net();
      net(input()).pow(2).sum().backward();
      whole(input()).pow(2).sum().backward();
      for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
        const auto expected = torch::nn::utils::clip_grad_norm_(whole->parameters(), 1e9, p);
        EXPECT_NEAR(grad_norm(parameters(*net), {.p = p}).item<double>(), expected, 1e-4 * expected) << p;
      }
      clip_grad_norm(parameters(*net), 0.5);
      torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.5);
      EXPECT_TRUE(at::allclose(full_grad(parameters(*net)[2]), whole->b->weight.grad(), 1e-4, 1e-6));
    });
  }
}

// --- Units and buffers ---

TEST(Units, NestToAnyDepthAndMayBeLists) {
  with_ranks(2, [](const Communicator& world) {
    struct Inner : nn::Module {
      nn::Linear first{nullptr}, second{nullptr};
      Inner() {
        first = register_module("first", nn::Linear(6, 6));
        second = register_module("second", nn::Linear(6, 6));
      }
      at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
    };
    struct Outer : nn::Module {
      std::shared_ptr<Inner> inner;
      nn::Linear head{nullptr}, tail{nullptr};
      at::Tensor scale;
      Outer() {
        inner = register_module("inner", std::make_shared<Inner>());
        head = register_module("head", nn::Linear(6, 6));
        tail = register_module("tail", nn::Linear(6, 6));
        scale = register_parameter("scale", torch::ones({6}));
      }
      at::Tensor forward(const at::Tensor& x) { return tail(head(inner->forward(x))) * scale; }
    };
    const auto make = [] {
      static std::mutex generator;
      std::lock_guard lock(generator);
      torch::manual_seed(3);
      return std::make_shared<Outer>();
    };
    auto whole = make(), sharded = make();
    const std::vector<std::shared_ptr<nn::Module>> ends = {sharded->head.ptr(), sharded->tail.ptr()};
    fully_shard(sharded->inner->first, {.mesh = world});  // depth 3
    fully_shard(sharded->inner, {.mesh = world});         // depth 2: takes `second`
    fully_shard(ends, {.mesh = world});                   // a list is one unit
    fully_shard(sharded, {.mesh = world});                // depth 1: takes `scale`
    ASSERT_EQ(units(*sharded).size(), 4);
    for (int step = 0; step < 3; step++) {
      whole->zero_grad();
      sharded->zero_grad();
      whole->forward(input()).pow(2).sum().backward();
      sharded->forward(input()).pow(2).sum().backward();
      const auto shards = sharded->named_parameters();
      for (const auto& item : whole->named_parameters()) {
        EXPECT_TRUE(at::allclose(full_grad(shards[item.key()]), item.value().grad(), 1e-5, 1e-6)) << item.key();
      }
    }
    EXPECT_EQ(shard_info(sharded->inner->named_parameters()["first.weight"])->unit, "inner.first");
  });
}

TEST(Buffers, AreMadeAlike) {
  with_ranks(3, [](const Communicator& world) {
    nn::BatchNorm1d norm(2);
    const auto mean_of = [&](BufferSync sync) {
      norm->running_mean.fill_(world.rank());
      sync_buffers(*norm, world, sync);
      return norm->running_mean[1].item<float>();
    };
    EXPECT_EQ(mean_of(BufferSync::Rank0), 0);
    EXPECT_EQ(mean_of(BufferSync::Mean), 1);
    EXPECT_EQ(mean_of(BufferSync::None), world.rank());
  });
}

// --- Mixed precision ---

TEST(MixedPrecision, UsesNarrowParametersAndKeepsWideShards) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    for (const auto& child : net->children()) fully_shard(child, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    auto narrow = seeded_net();
    narrow->to(at::kBFloat16);
    const auto y = net(input());
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(y, narrow->forward(input().to(at::kBFloat16))));
    y.pow(2).sum().backward();
    narrow->forward(input().to(at::kBFloat16)).pow(2).sum().backward();
    const auto shards = parameters(*net);
    EXPECT_EQ(shards[0].scalar_type(), at::kFloat);
    EXPECT_EQ(shards[0].grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(full_grad(shards[2]), narrow->b->weight.grad().to(at::kFloat)));
  });
}

TEST(MixedPrecision, CastsAnInputOncePerUnitAndVisit) {
  with_ranks(1, [](const Communicator& world) {
    nn::ModuleList heads(nn::Linear(8, 8), nn::Linear(8, 8), nn::Linear(8, 8));
    fully_shard(heads, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    auto x = at::ones({4, 8}).set_requires_grad(true);
    std::vector<at::Tensor> results;  // which keep what they were computed from
    const auto cast_of = [&](size_t head) {
      // addmm(bias, x, w.t()): the second edge leads to where its x came from.
      results.push_back(heads[head]->as<nn::Linear>()->forward(x));
      return results.back().grad_fn()->next_edge(1).function;
    };
    const auto first = cast_of(0);
    EXPECT_EQ(first->name(), "ToCopyBackward0");
    EXPECT_EQ(cast_of(1), first);
    {
      const torch::NoGradGuard no_grad;
      x.add_(1);
    }
    EXPECT_NE(cast_of(2), first);  // another value by now
  });
}

TEST(MixedPrecision, LeavesTheStatisticsOfBatchNormAlone) {
  with_ranks(2, [](const Communicator& world) {
    nn::BatchNorm1d norm(4);
    nn::BatchNorm1d reference(4);
    fully_shard(norm, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    const auto x = at::arange(20, at::kFloat).view({5, 4});
    norm(x);
    reference(x);
    EXPECT_TRUE(at::equal(norm->running_mean, reference->running_mean));
    EXPECT_TRUE(at::equal(norm->running_var, reference->running_var));
  });
}

}  // namespace
}  // namespace tessera::testing
