// What could go wrong with parameters that come and go: right, or refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unit/units.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/testing/net.h"

namespace tessera::testing {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

// --- Gathers and reductions ---

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

// --- Things that must come out right ---

/// What the loss of the unsharded model has to be for its gradients to be those of the sharded one.
at::Tensor mean_over_ranks(const Communicator& world, const std::function<at::Tensor(int rank)>& loss) {
  auto sum = loss(0);
  for (int rank = 1; rank < world.size(); rank++) sum = sum + loss(rank);
  return sum / world.size();
}

TEST(Gradients, AreThoseThatUsersOfShardsExpect) {
  with_ranks(3, [](const Communicator& world) {
    auto whole = seeded_net();
    auto net = sharded_net(world);
    const auto shards = parameters(*net);
    const auto originals = whole->parameters();
    const auto x = input(world.rank());
    const auto expect_same = [&](double factor) {
      for (size_t i = 0; i < shards.size(); i++) {
        EXPECT_TRUE(at::allclose(full_grad(shards[i]), originals[i].grad() * factor, 1e-5, 1e-5)) << i;
      }
    };
    mean_over_ranks(world, [&](int rank) { return whole(input(rank)).pow(2).sum(); }).backward();
    // Accumulation over several passes, two forwards before one backward, a graph used twice.
    net(x).pow(2).sum().backward();
    expect_same(1);
    net(x).pow(2).sum().backward();
    expect_same(2);
    net->zero_grad();
    (net(x).pow(2).sum() + net(x).pow(2).sum()).backward();
    expect_same(2);
    net->zero_grad();
    const auto loss = net(x).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    expect_same(2);
    net->zero_grad();

    const auto gradients = torch::autograd::grad({net(x).pow(2).sum()}, shards);
    ASSERT_EQ(gradients.size(), shards.size());
    EXPECT_EQ(gradients[0].sizes(), shards[0].sizes());
    EXPECT_FALSE(shards[0].grad().defined());

    int calls = 0;
    auto hooked = shards[0];
    hooked.register_hook([&calls](const at::Tensor& gradient) {
      calls++;
      return gradient * 2;
    });
    net(x).pow(2).sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(at::allclose(full_grad(shards[0]), originals[0].grad() * 2, 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(full_grad(shards[1]), originals[1].grad(), 1e-5, 1e-5));
  });
}

TEST(Gradients, OfInputsMayBeDifferentiatedAgain) {
  with_ranks(2, [](const Communicator& world) {
    const auto penalty = [](Net& net, int rank) {
      auto x = input(rank).set_requires_grad(true);
      const auto energy = net(x).pow(2).sum();
      const auto forces = torch::autograd::grad({energy}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      return forces.pow(2).sum() + energy;
    };
    auto whole = seeded_net();
    mean_over_ranks(world, [&](int rank) { return penalty(whole, rank); }).backward();
    auto net = sharded_net(world);
    penalty(net, world.rank()).backward();
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
    net(input(world.rank())).sum().backward();
    auto whole = seeded_net();
    mean_over_ranks(world, [&](int rank) { return whole(input(rank)).sum(); }).backward();
    for (size_t i = 0; i < 6; i++) {
      EXPECT_TRUE(at::allclose(full_grad(parameters(*net)[i]), whole->parameters()[i].grad(), 1e-5, 1e-6)) << i;
    }
  });
}

TEST(FrozenUnits, GetNoGradientUntilTheyThaw) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world), whole = seeded_net();
    for (const auto training : {Training::Frozen, Training::Trained, Training::Frozen}) {
      net->zero_grad();
      whole->zero_grad();
      set_requires_grad(*net->b, training);
      set_requires_grad(*whole->b, training);
      net(input(world.rank())).pow(2).sum().backward();
      mean_over_ranks(world, [&](int rank) { return whole(input(rank)).pow(2).sum(); }).backward();
      for (size_t i = 0; i < 6; i++) {
        const auto expected = whole->parameters()[i].grad(), actual = full_grad(parameters(*net)[i]);
        ASSERT_EQ(actual.defined(), expected.defined()) << i;
        EXPECT_TRUE(!expected.defined() || at::allclose(actual, expected, 1e-5, 1e-5)) << i;
      }
    }
  });
}

// --- Norms ---

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

TEST(NestedUnits, GoToAnyDepthAndMayBeLists) {
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
    const auto text = describe(*sharded);
    const auto line = [&](const std::string& start) { return text.find("\n" + start + " "); };
    EXPECT_LT(line("Outer"), line("  inner")) << text;
    EXPECT_LT(line("  inner"), line("    inner.first")) << text;
    EXPECT_LT(line("    inner.first"), line("  head+tail")) << text;
    EXPECT_NE(line("  head+tail"), std::string::npos) << text;
  });
}

TEST(NestedUnits, OfManyModulesKeepTheirLineShort) {
  with_ranks(1, [](const Communicator& world) {
    nn::ModuleList layers;
    std::vector<std::shared_ptr<nn::Module>> list;
    for (int i = 0; i < 40; i++) {
      list.push_back(nn::Linear(1, 1).ptr());
      layers->push_back(list.back());
    }
    fully_shard(list, {.mesh = world});
    fully_shard(layers, {.mesh = world});
    EXPECT_THAT(describe(*layers), ::testing::AllOf(HasSubstr("\n0+1+2+"), HasSubstr("..."), HasSubstr("+38+39 ")));
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

}  // namespace
}  // namespace tessera::testing
