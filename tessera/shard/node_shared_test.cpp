// Node-shared memory: no rank reads values that are only half written, and no rank waits without need.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/self/self.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/testing/net.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Net net_in(Residence residence, const Communicator& world, MixedPrecision precision = {}) {
  auto net = seeded_net();
  for (const auto& child : net->children()) {
    fully_shard(child, {.mesh = world, .mixed_precision = precision, .residence = residence});
  }
  return net;
}

/// Makes ranks fast and slow at every turn, each in its own way.
class Haste {
 public:
  Haste(int rank, bool on) : on_(on), random_(static_cast<unsigned>(rank) * 77 + 5) {}

  bool on() const { return on_; }

  void turn() {
    if (!on_) return;
    const auto draw = random_() % 4;
    if (draw == 1) std::this_thread::yield();
    if (draw >= 2) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 400));
  }

 private:
  bool on_;
  std::mt19937 random_;
};

/// What one rank does in a round of training; `step` is the number of the round.
struct Script {
  std::string name;
  std::function<void(Net& net, torch::optim::Optimizer* other, optim::Optimizer* own, Haste& haste, int rank, int round,
                     std::vector<double>& seen)>
      round;
  friend std::ostream& operator<<(std::ostream& out, const Script& script) { return out << script.name; }
};

at::Tensor loss_of(Net& net, int rank, int round) {
  return net(input(rank + 3 * round)).pow(2).mean();
}

void step(torch::optim::Optimizer* other, optim::Optimizer* own) {
  if (own != nullptr) {
    own->step();
  } else {
    other->step();
  }
}

void zero(torch::optim::Optimizer* other, optim::Optimizer* own) {
  if (own != nullptr) {
    own->zero_grad();
  } else {
    other->zero_grad();
  }
}

void learn(Net& net, Haste& haste, int rank, int round, std::vector<double>& seen) {
  const auto loss = loss_of(net, rank, round);
  haste.turn();
  seen.push_back(loss.item<double>());
  loss.backward();
  haste.turn();
}

/// In each round another rank leaves out the step.
void learn_but_skip_in_turn(Net& net, torch::optim::Optimizer* other, optim::Optimizer* own, Haste& haste, int rank, int round,
                            std::vector<double>& seen) {
  learn(net, haste, rank, round, seen);
  if (rank != round % 2) {
    step(other, own);
  } else if (own != nullptr) {
    own->skip_step();
  } else {
    skip_step(*net);
  }
  zero(other, own);
}

const Script kScripts[] = {
    {"Training",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       learn(net, haste, rank, round, seen);
       step(other, own);
       zero(other, own);
     }},
    {"Accumulation",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       for (int part = 0; part < 3; part++) learn(net, haste, rank, 3 * round + part, seen);
       step(other, own);
       zero(other, own);
     }},
    {"Evaluation",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       learn(net, haste, rank, round, seen);
       step(other, own);
       zero(other, own);
       const torch::NoGradGuard no_grad;
       // Every rank evaluates as much as it likes. Where parameters are gathered, all have to take part.
       const int wanted = 1 + (rank + round) % 3;
       for (int batch = 0; batch < (haste.on() ? wanted : 3); batch++) {
         const auto loss = loss_of(net, rank, batch).template item<double>();
         if (batch < wanted) seen.push_back(loss);
         haste.turn();
       }
     }},
    {"ForwardBetweenBackwardAndStep",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       learn(net, haste, rank, round, seen);
       {
         const torch::NoGradGuard no_grad;
         seen.push_back(loss_of(net, rank, round).template item<double>());
       }
       haste.turn();
       step(other, own);
       zero(other, own);
     }},
    {"RoundsWithoutAStep",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       learn(net, haste, rank, round, seen);
       if (round % 3 != 1) step(other, own);
       zero(other, own);
     }},
    {"TwoStepsAtOnce",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       learn(net, haste, rank, round, seen);
       step(other, own);
       haste.turn();
       step(other, own);
       zero(other, own);
     }},
    {"OneRankSkips", learn_but_skip_in_turn},
    {"OneRankSkipsAndALayerIsFrozen",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       if (round == 4) set_requires_grad(*net->b, Training::Frozen);
       learn_but_skip_in_turn(net, other, own, haste, rank, round, seen);
     }},
    {"AStepInAWrongPlaceIsRefused",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       learn(net, haste, rank, round, seen);
       {
         const auto guard = full_params(*net->a);
         EXPECT_THAT(message_of<UsageError>([&] { step(other, own); }), HasSubstr("in use as a whole"));
       }
       haste.turn();
       learn(net, haste, rank, round + 1, seen);
       step(other, own);
       zero(other, own);
     }},
    {"SomethingElseWritesAfterTheStep",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       learn(net, haste, rank, round, seen);
       step(other, own);
       zero(other, own);
       haste.turn();
       const torch::NoGradGuard no_grad;
       for (auto& shard : parameters(*net)) shard.mul_(0.99);
     }},
    {"WholeParametersAreWritten",
     [](Net& net, auto* other, auto* own, Haste& haste, int rank, int round, auto& seen) {
       learn(net, haste, rank, round, seen);
       {
         const torch::NoGradGuard no_grad;
         const auto guard = full_params(*net, Access::Write);
         haste.turn();
         net->b->weight.mul_(0.5);
       }
       step(other, own);
       zero(other, own);
     }},
};

enum class By { OurOptimizer, TorchOptimizer };

struct Case {
  Script script;
  By by;
  int ranks;
  bool narrow;
  friend std::ostream& operator<<(std::ostream& out, const Case& self) {
    return out << self.script << (self.by == By::OurOptimizer ? "_Ours_" : "_Torch_") << self.ranks << (self.narrow ? "_Narrow" : "");
  }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto& script : kScripts) {
    for (const auto by : {By::OurOptimizer, By::TorchOptimizer}) {
      for (const int ranks : {1, 2, 3}) cases.push_back({.script = script, .by = by, .ranks = ranks, .narrow = ranks == 2});
    }
  }
  return cases;
}

class Leases : public ::testing::TestWithParam<Case> {};

std::vector<double> run(const Communicator& world, const Case& test, Residence residence, bool hasty) {
  auto net = net_in(residence, world, test.narrow ? MixedPrecision{.param_dtype = at::kBFloat16} : MixedPrecision{});
  std::unique_ptr<optim::Optimizer> own;
  std::unique_ptr<torch::optim::Optimizer> other;
  if (test.by == By::OurOptimizer) {
    own = std::make_unique<optim::AdamW>(parameters(*net), optim::AdamWOptions{.lr = 0.01});
  } else {
    other = std::make_unique<torch::optim::AdamW>(parameters(*net), torch::optim::AdamWOptions(0.01));
  }
  Haste haste(world.rank(), hasty);
  std::vector<double> seen;
  for (int round = 0; round < 12; round++) test.script.round(net, other.get(), own.get(), haste, world.rank(), round, seen);
  for (const auto& [name, value] : full_state(*net)) seen.push_back(value.to(at::kDouble).sum().item<double>());
  return seen;
}

TEST_P(Leases, GiveTheNumbersOfGatheredParameters) {
  const auto& test = GetParam();
  with_ranks(test.ranks, [&](const Communicator& world) {
    const auto expected = run(world, test, Residence::Gathered, false);
    EXPECT_EQ(run(world, test, Residence::NodeShared, true), expected);
  });
}

INSTANTIATE_TEST_SUITE_P(, Leases, ::testing::ValuesIn(all_cases()), ::testing::PrintToStringParamName());

TEST(NodeShared, MovesNoParametersAndKeepsOneCopy) {
  with_ranks(2, [](const Communicator& world) {
    auto net = net_in(Residence::NodeShared, world);
    loss_of(net, world.rank(), 0).backward();
    world.barrier();
    EXPECT_EQ(world.traffic(Operation::AllGather).calls, 0U);
    EXPECT_EQ(counters(*net).gathered_bytes, 0U);
    EXPECT_EQ(counters(*net).peak_unsharded_bytes, 0U);
    EXPECT_EQ(counters(*net).reductions, 3U);
    EXPECT_THAT(describe(*net), HasSubstr("node-shared"));
    // The whole parameter lies in the same memory as the shards.
    const auto guard = full_params(*net);
    const auto* whole = static_cast<const std::byte*>(net->a->weight.const_data_ptr());
    const auto shard = parameters(*net->a).front();
    EXPECT_EQ(whole == static_cast<const std::byte*>(shard.const_data_ptr()), world.rank() == 0);
  });
}

TEST(NodeShared, IsWhatRanksOfOneHostChoose) {
  with_ranks(2, [](const Communicator& world) {
    EXPECT_THAT(describe(*net_in(Residence::Auto, world)), HasSubstr("node-shared"));
    EXPECT_THAT(describe(*net_in(Residence::Gathered, world)), HasSubstr("gathered"));
  });
}

TEST(NodeShared, IsRefusedWhereRanksHaveNoMemoryInCommon) {
  run_world({.transport = "gloo", .ranks = 2}, [](const Communicator& world) {
    EXPECT_THAT(message_of<ConfigError>([&] { net_in(Residence::NodeShared, world); }), HasSubstr("no memory in common"));
    auto net = net_in(Residence::Auto, world);
    EXPECT_THAT(describe(*net), HasSubstr("gathered"));
    net(input()).sum().backward();
  });
}

TEST(NodeShared, NamesTheRankThatTakesNoStep) {
  with_ranks(3, [](const Communicator& world) {
    auto net = net_in(Residence::NodeShared, world.with_limit(std::chrono::milliseconds(1000)));
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    loss_of(net, world.rank(), 0).backward();
    if (world.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    } else {
      EXPECT_THAT(message_of<CommError>([&] { optimizer.step(); }), AllOf(HasSubstr("of unit 'Linear'"), HasSubstr("rank 1")));
    }
  });
}

TEST(NodeShared, NamesTheRankThatReadsNothingNew) {
  with_ranks(2, [](const Communicator& world) {
    auto net = net_in(Residence::NodeShared, world.with_limit(std::chrono::milliseconds(1000)));
    torch::optim::SGD optimizer(parameters(*net), torch::optim::SGDOptions(0.1));
    loss_of(net, world.rank(), 0).backward();
    optimizer.step();
    if (world.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    } else {
      EXPECT_THAT(message_of<TimeoutError>([&] { loss_of(net, 0, 1); }), AllOf(HasSubstr("reading version 1"), HasSubstr("rank 1")));
    }
  });
}

TEST(NodeShared, GradientsThatAreStillOnTheirWayAreWaitedForByWhoeverLooksAtThem) {
  with_ranks(2, [](const Communicator& world) {
    auto shared = net_in(Residence::NodeShared, world);
    auto gathered = net_in(Residence::Gathered, world);
    for (auto* net : {&shared, &gathered}) {
      for (auto& shard : parameters(**net)) shard.register_hook([](const at::Tensor& gradient) { return gradient.clamp(-0.1, 0.1); });
      loss_of(*net, world.rank(), 0).backward();
      loss_of(*net, world.rank(), 1).backward();
    }
    const auto ours = parameters(*shared), theirs = parameters(*gathered);
    for (size_t i = 0; i < ours.size(); i++) EXPECT_TRUE(at::equal(full_grad(ours[i]), full_grad(theirs[i])));
  });
}

TEST(NodeShared, RanksThatAddUpDifferentUnitsAreToldSoAndMayGoOn) {
  with_ranks(2, [](const Communicator& world) {
    auto one = net_in(Residence::NodeShared, world), other = net_in(Residence::NodeShared, world);
    for (auto* net : {&one, &other}) loss_of(*net, 0, 0);
    auto& mine = world.rank() == 0 ? one : other;
    const auto disagreement = [&] { return message_of<CommError>([&] { loss_of(mine, 0, 0).backward(); }); };
    EXPECT_THAT(disagreement(), HasSubstr("ranks disagree"));
    for (auto* net : {&one, &other}) {
      for (auto& shard : parameters(**net)) shard.mutable_grad() = at::Tensor();
    }
    loss_of(one, world.rank(), 0).backward();
    loss_of(other, world.rank(), 0).backward();
    const auto ours = parameters(*one), theirs = parameters(*other);
    for (size_t i = 0; i < ours.size(); i++) EXPECT_TRUE(at::equal(full_grad(ours[i]), full_grad(theirs[i])));
  });
}

TEST(NodeShared, ModelsOfOneWorldMayTrainInThreadsOfTheirOwn) {
  const auto world = self_world();
  const auto train = [&](int seed) {
    auto net = net_in(Residence::NodeShared, world);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    double loss = 0;
    for (int step = 0; step < 200; step++) {
      const auto value = loss_of(net, seed, step % 3);
      value.backward();
      optimizer.step();
      optimizer.zero_grad();
      loss = value.item<double>();
    }
    return loss;
  };
  const double expected[] = {train(0), train(1)};
  double actual[2];
  {
    const std::jthread one([&] { actual[0] = train(0); }), other([&] { actual[1] = train(1); });
  }
  EXPECT_EQ(actual[0], expected[0]);
  EXPECT_EQ(actual[1], expected[1]);
}

TEST(NodeShared, UnitsMayBeReadInAnyOrderAfterAStepOfTorch) {
  with_ranks(2, [](const Communicator& world) {
    auto net = net_in(Residence::NodeShared, world);
    torch::optim::SGD optimizer(parameters(*net), torch::optim::SGDOptions(0.1));
    for (int round = 0; round < 3; round++) {
      loss_of(net, world.rank(), round).backward();
      optimizer.step();
      optimizer.zero_grad();
      const torch::NoGradGuard no_grad;
      const auto x = at::ones({1, 6}), y = at::ones({1, 10});
      if (world.rank() == 0) net->a(x);
      net->c(y);
      if (world.rank() != 0) net->a(x);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
