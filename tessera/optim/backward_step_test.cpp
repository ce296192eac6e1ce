// Steps in backward give the same bits as steps after backward, leave no gradients, and refuse what needs gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/adagrad.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/lamb.h"
#include "tessera/optim/lion.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/local.h"
#include "tessera/shard/memory/gradient_slots.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/recover.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/allocations.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/residences.h"

namespace tessera::testing::backward_step_test {
namespace {

using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using Made = std::unique_ptr<optim::Optimizer>;

struct Rule {
  std::string name;
  std::function<Made(std::vector<optim::ParameterGroup>)> make;
};

const Rule kRules[] = {
    {"Sgd",
     [](auto g) -> Made { return std::make_unique<optim::SGD>(g, optim::SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5}); }},
    {"Adam", [](auto g) -> Made { return std::make_unique<optim::Adam>(g, optim::AdamOptions{.lr = 0.01, .weight_decay = 0.1}); }},
    {"AdamW", [](auto g) -> Made { return std::make_unique<optim::AdamW>(g, optim::AdamWOptions{.lr = 0.01}); }},
    {"Adagrad", [](auto g) -> Made { return std::make_unique<optim::Adagrad>(g, optim::AdagradOptions{.lr = 0.1, .lr_decay = 0.1}); }},
    {"Lion", [](auto g) -> Made { return std::make_unique<optim::Lion>(g, optim::LionOptions{.lr = 0.01, .weight_decay = 0.1}); }},
    {"AdamW8bit", [](auto g) -> Made { return std::make_unique<optim::AdamW8bit>(g, optim::AdamWOptions{.lr = 0.01}); }},
};

/// The rules that the device has.
std::span<const Rule> rules() {
  return std::span(kRules).first(std::size(kRules) - (on_cpu() ? 0 : 1));
}

Made adamw(Tensors parameters) {
  return std::make_unique<optim::AdamW>(std::move(parameters), optim::AdamWOptions{.lr = 0.01});
}

/// Odd sizes; `b` is not used in every step, and `c` has a frozen bias.
struct OddImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
  explicit OddImpl(int64_t width = 13) {
    a = register_module("a", torch::nn::Linear(6, width));
    b = register_module("b", torch::nn::Linear(width, width));
    c = register_module("c", torch::nn::Linear(width, 5));
    fill_with_numbers(*this, 0.3);
    c->bias.set_requires_grad(false);
  }
  at::Tensor loss(int step, int rank) {
    const auto x = a(numbers({4, 6}, 10 * step + rank));
    const auto y = c(torch::tanh(step % 3 == 2 ? x : b(torch::tanh(x)))).pow(2).mean();
    return step % 3 == 1 ? y + c(a(numbers({2, 6}, step))).sum() : y;  // or two forward passes, one backward
  }
};
TORCH_MODULE(Odd);

enum class Units { One, EachLayer };

Odd sharded_odd(const ShardOptions& options, Units units, int64_t width = 13) {
  Odd net(width);
  if (units == Units::EachLayer) {
    for (const auto& child : net->children()) fully_shard(child, options);
  }
  fully_shard(net, options);
  return net;
}

/// Matrices and the rest in groups of their own, so that groups cut through units.
std::vector<optim::ParameterGroup> groups_of(const torch::nn::Module& net) {
  std::vector<optim::ParameterGroup> groups = {{.parameters = {}, .lr = {}, .weight_decay = {}},
                                               {.parameters = {}, .lr = 0.02, .weight_decay = 0}};
  for (const auto& parameter : parameters(net)) groups[parameter.dim() >= 2 ? 0 : 1].parameters.push_back(parameter);
  if (groups.back().parameters.empty()) groups.pop_back();
  if (groups.front().parameters.empty()) groups.erase(groups.begin());
  return groups;
}

void take_steps(Odd& net, optim::Optimizer& optimizer, const Communicator& world, int from = 0, int to = 6) {
  for (int step = from; step < to; step++) {
    optimizer.set_lr(0.01 * (1 + step));
    net->loss(step, world.rank()).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

void expect_same_bits(const Odd& actual, const Odd& expected, const optim::Optimizer& in_backward, const optim::Optimizer& after) {
  const auto ours = parameters(*actual), theirs = parameters(*expected);
  for (size_t i = 0; i < ours.size(); i++) EXPECT_TRUE(at::equal(to_local(ours[i]), to_local(theirs[i]))) << "parameter " << i;
  const auto state = in_backward.state(*actual), other = after.state(*expected);
  ASSERT_EQ(state.size(), other.size());
  for (const auto& [name, kinds] : other) {
    for (const auto& [kind, values] : kinds) EXPECT_TRUE(at::equal(state.at(name).at(kind), values)) << name << " " << kind;
  }
}

void expect_same_bits_with(const ShardOptions& options, Units units, const Rule& rule, int64_t width = 13) {
  auto stepped = sharded_odd(options, units, width), plain = sharded_odd(options, units, width);
  const auto in_backward = rule.make(groups_of(*stepped)), after = rule.make(groups_of(*plain));
  in_backward->step_in_backward();
  take_steps(stepped, *in_backward, options.mesh->world());
  take_steps(plain, *after, options.mesh->world());
  expect_same_bits(stepped, plain, *in_backward, *after);
}

class Steps : public ::testing::TestWithParam<int> {};

TEST_P(Steps, InBackwardHaveTheBitsOfStepsAfterIt) {
  const int ranks = GetParam();
  for (const auto residence : residences()) {
    for (const auto& rule : rules()) {
      SCOPED_TRACE(rule.name);
      with_ranks(ranks, [&](const Communicator& world) {
        expect_same_bits_with({.mesh = world, .residence = residence}, Units::EachLayer, rule);
        const MixedPrecision narrow{.param_dtype = at::kBFloat16};
        expect_same_bits_with({.mesh = world, .mixed_precision = narrow, .residence = residence}, Units::One, rule);
      });
    }
    for (const auto layout : {Layout::Rows, Layout::WholeParameters}) {
      with_ranks(ranks, [&](const Communicator& world) {
        expect_same_bits_with({.mesh = world, .residence = residence, .layout = layout}, Units::EachLayer, kRules[2]);
        expect_same_bits_with({.mesh = world, .residence = residence, .layout = layout}, Units::One, rules().back());
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Steps, ::testing::Values(1, 2, 3, 4));

TEST(Steps, InBackwardTakeLargeUnitsInParts) {
  for (const auto residence : residences()) {
    for (const auto* rule : {&kRules[2], &rules().back()}) {
      const int64_t width = 600;  // more values than the parts of two threads
      with_ranks(2, [&](const Communicator& world) {
        expect_same_bits_with({.mesh = world, .residence = residence}, Units::EachLayer, *rule, width);
      });
    }
  }
}

TEST(Steps, InBackwardKeepNoSumsOfUnitsWithOneGradientSlot) {
  if (!on_cpu()) GTEST_SKIP() << "it needs memory that ranks share";
  const int64_t width = 3000, bytes = width * width * 4;
  ASSERT_GT(static_cast<size_t>(bytes), GradientSlots::kLargeSlot);
  with_ranks(2, [&](const Communicator& world) {
    const ShardOptions options{.mesh = world, .residence = Residence::NodeShared};
    expect_same_bits_with(options, Units::EachLayer, kRules[2], width);
    auto net = sharded_odd(options, Units::EachLayer, width);
    const auto optimizer = adamw(parameters(*net));
    optimizer->step_in_backward();
    take_steps(net, *optimizer, world, 0, 1);  // allocates the optimizer's state
    const Allocations allocations;
    take_steps(net, *optimizer, world, 3, 4);
    EXPECT_GE(allocations.bytes(), bytes) << "this rank's gradient of the large layer";
    EXPECT_LT(allocations.bytes(), bytes + bytes / 4) << "this rank's part of the sum would be half of that";
  });
}

TEST(Steps, InBackwardAverageOverReplicasFirst) {
  for (const auto residence : residences()) {
    with_ranks(4, [&](const Communicator& world) {
      const ShardOptions options{.mesh = Mesh(world, {.replicate = 2, .shard = 2}), .residence = residence};
      expect_same_bits_with(options, Units::EachLayer, kRules[2]);
    });
  }
}

TEST(Steps, InBackwardUpdateListedVectors) {
  with_ranks(2, [](const Communicator& world) {
    auto stepped = seeded_net(), plain = seeded_net();
    for (auto* net : {&stepped, &plain}) fully_shard(*net, {.mesh = world, .listing = Listing::Flat});
    const auto in_backward = adamw(stepped->parameters()), after = adamw(plain->parameters());
    in_backward->step_in_backward();
    for (int step = 0; step < 3; step++) {
      stepped(input(world.rank())).pow(2).sum().backward();
      in_backward->step();
      plain(input(world.rank())).pow(2).sum().backward();
      after->step();
      after->zero_grad();
    }
    EXPECT_TRUE(at::equal(to_local(stepped->parameters()[0]), to_local(plain->parameters()[0])));
  });
}

TEST(Steps, InBackwardKeepNoGradients) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::EachLayer);
    const auto optimizer = adamw(parameters(*net));
    const auto has_memory = [&] {
      return std::ranges::any_of(units(*net), [](const auto& unit) {
        const auto held = unit->schedule()->lock();
        return std::ranges::any_of(unit->groups(), [&](const auto& group) {
          return group.parameters.front().shard.requires_grad() && unit->state(held).reduction.target(group) != nullptr;
        });
      });
    };
    take_steps(net, *optimizer, world, 0, 1);
    EXPECT_EQ(has_memory(), on_cpu()) << "on a device only until the gradients are there";
    optimizer->step_in_backward();
    net->loss(1, world.rank()).backward();
    for (const auto& parameter : parameters(*net)) EXPECT_FALSE(parameter.grad().defined());
    EXPECT_FALSE(has_memory());
    optimizer->step();
    // Steps after backward again.
    optimizer->step_after_backward();
    take_steps(net, *optimizer, world, 2, 4);
    EXPECT_EQ(has_memory(), on_cpu()) << "on a device only until the gradients are there";
    auto plain = sharded_odd({.mesh = world}, Units::EachLayer);
    const auto after = adamw(parameters(*plain));
    for (int step = 0; step < 4; step++) {
      if (step != 1) after->set_lr(0.01 * (1 + step));
      plain->loss(step, world.rank()).backward();
      after->step();
      after->zero_grad();
    }
    expect_same_bits(net, plain, *optimizer, *after);
  });
}

TEST(Steps, InBackwardGoOnFromASavedState) {
  with_ranks(3, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::EachLayer), twin = sharded_odd({.mesh = world}, Units::EachLayer);
    const auto first = adamw(parameters(*net)), second = adamw(parameters(*twin));
    first->step_in_backward();
    take_steps(net, *first, world, 0, 3);
    second->load_state(*twin, first->state(*net));
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters(*net).size(); i++) parameters(*twin)[i].copy_(parameters(*net)[i]);
    }
    second->step_in_backward();
    take_steps(net, *first, world, 3, 6);
    take_steps(twin, *second, world, 3, 6);
    expect_same_bits(net, twin, *first, *second);
  });
}

TEST(Steps, InBackwardLeaveGradientsOfOthersAlone) {
  for (const auto residence : residences()) {
    with_ranks(2, [&](const Communicator& world) {
      const ShardOptions options{.mesh = world, .residence = residence};
      auto stepped = sharded_odd(options, Units::EachLayer), plain = sharded_odd(options, Units::EachLayer);
      const auto weights = [](const Odd& net) { return Tensors{net->parameters()[0], net->parameters()[2], net->parameters()[4]}; };
      const auto biases = [](const Odd& net) { return Tensors{net->parameters()[1], net->parameters()[3]}; };
      const auto in_backward = adamw(weights(stepped)), after = adamw(weights(plain));
      torch::optim::SGD other(biases(stepped), torch::optim::SGDOptions(0.1)), same(biases(plain), torch::optim::SGDOptions(0.1));
      in_backward->step_in_backward();
      for (int step = 0; step < 6; step++) {
        stepped->loss(step, world.rank()).backward();
        EXPECT_FALSE(weights(stepped)[0].grad().defined());
        EXPECT_TRUE(biases(stepped)[0].grad().defined());
        in_backward->step();
        other.step();
        other.zero_grad();
        plain->loss(step, world.rank()).backward();
        after->step();
        same.step();
        plain->zero_grad();
      }
      expect_same_bits(stepped, plain, *in_backward, *after);
    });
  }
}

TEST(Steps, InBackwardShowInTheSamePassOnlyAsAWhole) {
  for (const auto residence : residences()) {
    with_ranks(2, [&](const Communicator& world) {
      auto net = sharded_odd({.mesh = world, .residence = residence}, Units::EachLayer);
      const auto optimizer = adamw(parameters(*net));
      optimizer->step_in_backward();
      for (int step = 0; step < 4; step++) {
        const auto before = full_parameter(net->parameters()[4]);
        at::Tensor seen;
        auto x = net->a(numbers({4, 6}, world.rank()));
        // Runs when the gradients of `c` are sent, and perhaps not yet added up.
        x.register_hook([&](const at::Tensor&) {
          const torch::NoGradGuard no_grad;
          seen = net->c->weight + 0;
        });
        net->c(x).pow(2).mean().backward();
        optimizer->step();
        EXPECT_TRUE(at::equal(seen, full_parameter(net->parameters()[4])));
        EXPECT_FALSE(at::equal(seen, before));
      }
    });
  }
}

TEST(Steps, InBackwardDoNotDisturbTwoModelsInOnePass) {
  with_ranks(2, [](const Communicator& world) {
    std::vector<Tensors> results;
    for (const bool in_backward : {true, false}) {
      auto one = sharded_odd({.mesh = world}, Units::EachLayer), other = sharded_odd({.mesh = world}, Units::EachLayer, 17);
      const auto first = adamw(parameters(*one)), second = adamw(parameters(*other));
      if (in_backward) {
        first->step_in_backward();
        second->step_in_backward();
      }
      for (int step = 0; step < 5; step++) {
        (one->loss(step, world.rank()) + other->loss(step, world.rank()) * 2).backward();
        for (const auto* optimizer : {&first, &second}) {
          (*optimizer)->step();
          (*optimizer)->zero_grad();
        }
      }
      results.emplace_back();
      for (const auto& net : {one, other}) {
        for (const auto& parameter : parameters(*net)) results.back().push_back(to_local(parameter));
      }
    }
    for (size_t i = 0; i < results[0].size(); i++) EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
  });
}

TEST(Steps, InBackwardRefuseGradientHooks) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::EachLayer);
    const auto optimizer = adamw(parameters(*net));
    optimizer->step_in_backward();
    for (const auto& shard : parameters(*net)) {
      if (shard.requires_grad()) register_gradient_hook(shard, [](const at::Tensor&) {});
    }
    EXPECT_THAT(message_of<UsageError>([&] { net->loss(0, world.rank()).backward(); }),
                HasSubstr("has a hook, which would see no gradient"));
  });
}

TEST(Steps, InBackwardCountNoneWithoutABackward) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::EachLayer);
    const auto optimizer = adamw(parameters(*net));
    optimizer->step_in_backward();
    take_steps(net, *optimizer, world, 0, 1);
    const auto before = optimizer->state(*net);
    EXPECT_THROW(optimizer->step(), UsageError);
    const auto after = optimizer->state(*net);
    for (const auto& [name, state] : before) {
      for (const auto& [kind, value] : state) EXPECT_TRUE(at::equal(after.at(name).at(kind), value)) << name << "." << kind;
    }
    take_steps(net, *optimizer, world, 1, 2);
  });
}

TEST(Steps, InBackwardRefuseWhatNeedsGradients) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::EachLayer);
    const auto optimizer = adamw(parameters(*net));
    optimizer->scale_gradients(at::full({}, 0.5));
    EXPECT_THAT(message_of<UsageError>([&] { optimizer->step_in_backward(); }), HasSubstr("scaled already"));
    optimizer->zero_grad();
    optimizer->step_in_backward();
    const auto expect_refused = [&](const std::string& name, const auto& act) {
      EXPECT_THAT(message_of<UsageError>(act), ::testing::AllOf(HasSubstr(name), HasSubstr("step_after_backward()")));
    };
    expect_refused("clip_grad_norm:", [&] { optimizer->clip_grad_norm(1); });
    expect_refused("scale_gradients:", [&] { optimizer->scale_gradients(at::ones({})); });
    expect_refused("the norm of the gradients: the optimizer of unit 'a'", [&] { clip_grad_norm(parameters(*net), 1); });
    net->loss(0, world.rank()).backward();
    expect_refused("call step() after every backward pass", [&] { net->loss(0, world.rank()).backward(); });
    EXPECT_THAT(message_of<UsageError>([&] { optimizer->skip_step(); }), HasSubstr("has stepped in backward already"));
  });
}

TEST(Steps, InBackwardRefuseGradientsThatTheyWouldLose) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::EachLayer);
    const auto optimizer = adamw(parameters(*net));
    const auto refused = [&] { return message_of<UsageError>([&] { net->loss(0, world.rank()).backward(); }); };
    net->loss(0, world.rank()).backward();
    optimizer->step_in_backward();
    EXPECT_THAT(refused(), HasSubstr("'c.weight' has a gradient from before"));
    recover(*net);
    auto weight = parameters(*net)[4];
    const auto hook = weight.register_hook([](const at::Tensor&) {});
    EXPECT_THAT(refused(), HasSubstr("the shard of 'c.weight' has a hook"));
    recover(*net);
    weight.remove_hook(hook);
    EXPECT_NO_THROW(net->loss(0, world.rank()).backward());
  });
}

TEST(Steps, InBackwardRefuseChosenGradients) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::EachLayer);
    const auto optimizer = adamw(parameters(*net));
    optimizer->step_in_backward();
    const auto before = to_local(parameters(*net)[4]);
    EXPECT_THAT(message_of<UsageError>([&] { torch::autograd::grad({net->loss(0, 0)}, {parameters(*net)[4]}); }),
                HasSubstr("gradients of chosen tensors"));
    EXPECT_TRUE(at::equal(to_local(parameters(*net)[4]), before));
    // Gradients of inputs need no gradients of shards.
    auto x = at::ones({2, 6}).set_requires_grad(true);
    EXPECT_TRUE(torch::autograd::grad({net->a(x).sum()}, {x})[0].defined());
  });
}

TEST(Steps, InBackwardRefuseUnitsInUseAndOldGraphs) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::EachLayer);
    const auto optimizer = adamw(parameters(*net));
    optimizer->step_in_backward();
    {
      const auto loss = net->loss(0, world.rank());
      const auto whole = full_params(*net->c);
      EXPECT_THAT(message_of<UsageError>([&] { loss.backward(); }), HasSubstr("in use unsharded"));
    }
    recover(*net);
    const auto old = net->loss(0, world.rank());
    net->loss(1, world.rank()).backward();
    optimizer->step();
    EXPECT_THAT(message_of<c10::Error>([&] { old.backward(); }), HasSubstr("modified by an inplace operation"));
    recover(*net);
    // A parameter that is needed once more after its gradient is complete.
    const auto y = net->a(at::ones({2, 6}));
    const auto early = y.mm(net->b->weight.detach());
    const auto late = net->b(y);  // made last, so its backward comes first
    EXPECT_THAT(message_of<c10::Error>([&] { net->c(early + late).sum().backward(); }), HasSubstr("modified by an inplace operation"));
  });
}

TEST(Steps, InBackwardAreNotForEveryOptimizer) {
  auto leaf = at::ones({3}).set_requires_grad(true);
  EXPECT_THAT(message_of<UsageError>([&] { optim::SGD({leaf}, {}).step_in_backward(); }), HasSubstr("none of the parameters is a shard"));
  with_ranks(1, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::One);
    EXPECT_THAT(message_of<UsageError>([&] { optim::Lamb(parameters(*net), {}).step_in_backward(); }),
                HasSubstr("needs the gradients of all parameters"));
    const auto all = parameters(*net);
    const auto first = adamw({all[0], all[1]}), second = adamw({all[2], all[3]});
    first->step_in_backward();
    EXPECT_THAT(message_of<UsageError>([&] { second->step_in_backward(); }), HasSubstr("another optimizer steps in backward already"));
    first->step_after_backward();
    EXPECT_NO_THROW(second->step_in_backward());
  });
}

TEST(Steps, InBackwardOnSomeRanksAreNamed) {
  for (const auto residence : residences()) {
    with_ranks(2, [&](const Communicator& world) {
      auto net = sharded_odd({.mesh = world, .residence = residence}, Units::EachLayer);
      const auto optimizer = adamw(parameters(*net));
      if (world.rank() == 0) optimizer->step_in_backward();
      EXPECT_THAT(message_of<DisagreementError>([&] { net->loss(0, world.rank()).backward(); }),
                  HasSubstr("reduce_scatter of 'c, with its step in backward'"));
    });
  }
}

TEST(Steps, InBackwardEndWithTheirOptimizer) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_odd({.mesh = world}, Units::EachLayer);
    auto optimizer = adamw(parameters(*net));
    optimizer->step_in_backward();
    auto y = net->b(net->a(at::ones({2, 6})));
    y.register_hook([&](const at::Tensor&) { optimizer.reset(); });  // when the gradients of `c` are on their way
    EXPECT_THAT(message_of<UsageError>([&] { net->c(y).sum().backward(); }), HasSubstr("was destroyed while backward ran"));
    recover(*net);
    net->loss(0, world.rank()).backward();
    EXPECT_TRUE(parameters(*net)[0].grad().defined());
  });
}

}  // namespace
}  // namespace tessera::testing::backward_step_test
