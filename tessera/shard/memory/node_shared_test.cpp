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
#include "tessera/shard/unit/units.h"
#include "tests/testing/net.h"

namespace tessera::testing::node_shared_test {
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

/// Delays each rank at random, so that ranks interleave in many ways.
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

at::Tensor loss_of(Net& net, int rank, int round) {
  return net(input(rank + 3 * round)).pow(2).mean();
}

enum class By { OurOptimizer, TorchOptimizer };

/// The training of one rank. A script runs one round of it.
struct Run {
  Net net;
  std::function<void()> step, skip_step, zero_grad;
  Haste haste;
  int rank = 0, round = 0;
  std::vector<double> seen = {};

  Run(Net model, By by, int own_rank, bool hasty) : net(std::move(model)), haste(own_rank, hasty), rank(own_rank) {
    const auto use = [this](auto optimizer) {
      step = [optimizer] { optimizer->step(); };
      zero_grad = [optimizer] { optimizer->zero_grad(); };
      return optimizer;
    };
    if (by == By::OurOptimizer) {
      skip_step = [own = use(std::make_shared<optim::AdamW>(parameters(*net), optim::AdamWOptions{.lr = 0.01}))] { own->skip_step(); };
    } else {
      use(std::make_shared<torch::optim::AdamW>(parameters(*net), torch::optim::AdamWOptions(0.01)));
      skip_step = [this] { tessera::skip_step(*net); };
    }
  }
  Run(const Run&) = delete;

  at::Tensor loss(int number) { return loss_of(net, rank, number); }

  void learn(int number) {
    const auto now = loss(number);
    haste.turn();
    seen.push_back(now.item<double>());
    now.backward();
    haste.turn();
  }
};

struct Script {
  std::string name;
  std::function<void(Run& run)> round;
  friend std::ostream& operator<<(std::ostream& out, const Script& script) { return out << script.name; }
};

/// In each round, another rank skips the step.
void learn_but_skip_in_turn(Run& run) {
  run.learn(run.round);
  if (run.rank != run.round % 2) {
    run.step();
  } else {
    run.skip_step();
  }
  run.zero_grad();
}

const Script kScripts[] = {
    {"Training",
     [](Run& run) {
       run.learn(run.round);
       run.step();
       run.zero_grad();
     }},
    {"Accumulation",
     [](Run& run) {
       for (int part = 0; part < 3; part++) run.learn(3 * run.round + part);
       run.step();
       run.zero_grad();
     }},
    {"Evaluation",
     [](Run& run) {
       run.learn(run.round);
       run.step();
       run.zero_grad();
       const torch::NoGradGuard no_grad;
       // With haste, each rank evaluates another number of batches. Where parameters are gathered, all ranks evaluate all three, but record
       // only as many.
       const int wanted = 1 + (run.rank + run.round) % 3;
       for (int batch = 0; batch < (run.haste.on() ? wanted : 3); batch++) {
         const auto loss = run.loss(batch).item<double>();
         if (batch < wanted) run.seen.push_back(loss);
         run.haste.turn();
       }
     }},
    {"ForwardBetweenBackwardAndStep",
     [](Run& run) {
       run.learn(run.round);
       {
         const torch::NoGradGuard no_grad;
         run.seen.push_back(run.loss(run.round).item<double>());
       }
       run.haste.turn();
       run.step();
       run.zero_grad();
     }},
    {"RoundsWithoutAStep",
     [](Run& run) {
       run.learn(run.round);
       if (run.round % 3 != 1) run.step();
       run.zero_grad();
     }},
    {"TwoStepsAtOnce",
     [](Run& run) {
       run.learn(run.round);
       run.step();
       run.haste.turn();
       run.step();
       run.zero_grad();
     }},
    {"OneRankSkips", learn_but_skip_in_turn},
    {"OneRankSkipsAndALayerIsFrozen",
     [](Run& run) {
       if (run.round == 4) set_requires_grad(*run.net->b, Training::Frozen);
       learn_but_skip_in_turn(run);
     }},
    {"AStepInAWrongPlaceIsRefused",
     [](Run& run) {
       run.learn(run.round);
       {
         const auto guard = full_params(*run.net->a);
         EXPECT_THAT(message_of<UsageError>([&] { run.step(); }), HasSubstr("in use unsharded"));
       }
       run.haste.turn();
       run.learn(run.round + 1);
       run.step();
       run.zero_grad();
     }},
    {"SomethingElseWritesAfterTheStep",
     [](Run& run) {
       run.learn(run.round);
       run.step();
       run.zero_grad();
       run.haste.turn();
       const torch::NoGradGuard no_grad;
       for (auto& shard : parameters(*run.net)) shard.mul_(0.99);
     }},
    {"WholeParametersAreWritten",
     [](Run& run) {
       run.learn(run.round);
       {
         const torch::NoGradGuard no_grad;
         const auto guard = full_params(*run.net, Access::Write);
         run.haste.turn();
         run.net->b->weight.mul_(0.5);
       }
       run.step();
       run.zero_grad();
     }},
};

struct Case {
  Script script;
  By by;
  int ranks;
  bool narrow;
  std::vector<int> host_of = {};
  friend std::ostream& operator<<(std::ostream& out, const Case& self) {
    return out << self.script << (self.by == By::OurOptimizer ? "_Ours_" : "_Torch_") << self.ranks << (self.narrow ? "_Narrow" : "")
               << (self.host_of.empty() ? "" : "_TwoHosts");
  }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto& script : kScripts) {
    for (const auto by : {By::OurOptimizer, By::TorchOptimizer}) {
      for (const int ranks : {1, 2, 3}) cases.push_back({.script = script, .by = by, .ranks = ranks, .narrow = ranks == 2});
      cases.push_back({.script = script, .by = by, .ranks = 3, .narrow = by == By::TorchOptimizer, .host_of = {0, 0, 1}});
    }
  }
  return cases;
}

class RanksInHaste : public ::testing::TestWithParam<Case> {};

std::vector<double> numbers_of(const Communicator& world, const Case& test, Residence residence, bool hasty) {
  Run run(net_in(residence, world, test.narrow ? MixedPrecision{.param_dtype = at::kBFloat16} : MixedPrecision{}), test.by, world.rank(),
          hasty);
  for (; run.round < 12; run.round++) test.script.round(run);
  for (const auto& [name, value] : full_state(*run.net)) run.seen.push_back(value.to(at::kDouble).sum().item<double>());
  return run.seen;
}

TEST_P(RanksInHaste, GiveTheNumbersOfGatheredParameters) {
  const auto& test = GetParam();
  const auto program = [&](const Communicator& world) {
    const auto expected = numbers_of(world, test, Residence::Gathered, false);
    EXPECT_EQ(numbers_of(world, test, Residence::NodeShared, true), expected);
  };
  with_ranks(test.ranks, program, test.host_of);
}

INSTANTIATE_TEST_SUITE_P(, RanksInHaste, ::testing::ValuesIn(all_cases()), ::testing::PrintToStringParamName());

TEST(NodeShared, MovesNoParametersAndKeepsOneCopy) {
  with_ranks(2, [](const Communicator& world) {
    auto net = net_in(Residence::NodeShared, world);
    world.reset_traffic();
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

/// Returns how many bytes the ranks of each host sent to the other host.
std::vector<uint64_t> sent_across(const Communicator& world, Operation operation) {
  std::vector<uint64_t> of_host(static_cast<size_t>(world.topology().hosts()));
  const auto all = world.texts(std::to_string(world.traffic(operation).across), {});
  for (int rank = 0; rank < world.size(); rank++) of_host[static_cast<size_t>(world.topology().host_of(rank))] += std::stoull(all[rank]);
  return of_host;
}

class OverHosts : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(OverHosts, ParametersCrossTheNetworkOnceForEachVersion) {
  const auto program = [](const Communicator& world) {
    auto net = net_in(Residence::NodeShared, world);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    uint64_t model = 0;  // bytes, with the padding of the layout
    for (const auto& unit : units(*net)) {
      for (const auto& buffer : unit->buffers()) model += buffer.own.nbytes() * static_cast<uint64_t>(world.size());
    }
    for (int step = 0; step < 3; step++) {
      world.reset_traffic();
      const auto before = counters(*net).gathered_bytes;
      for (int pass = 0; pass < 2; pass++) loss_of(net, world.rank(), pass).backward();  // the second pass fetches nothing
      optimizer.step();
      optimizer.zero_grad();
      const auto sent = sent_across(world, Operation::AllGather), reduced = sent_across(world, Operation::ReduceScatter);
      for (int host = 0; host < 2; host++) {
        const auto on_host = [&](int which) { return static_cast<uint64_t>(std::ssize(world.topology().ranks_on(which))); };
        EXPECT_EQ(sent[host], model * on_host(host) / static_cast<uint64_t>(world.size()));
        EXPECT_EQ(reduced[host], 2 * model * on_host(1 - host) / static_cast<uint64_t>(world.size())) << "the sums of two passes";
      }
      uint64_t received = 0;
      for (const auto& each : world.texts(std::to_string(counters(*net).gathered_bytes - before), {})) received += std::stoull(each);
      EXPECT_EQ(received, model);
      EXPECT_EQ(counters(*net).peak_unsharded_bytes, 0U);
    }
    EXPECT_THAT(describe(*net), HasSubstr("node-shared"));
  };
  with_ranks(static_cast<int>(GetParam().size()), program, GetParam());
}

INSTANTIATE_TEST_SUITE_P(, OverHosts, ::testing::Values(std::vector{0, 0, 1, 1}, std::vector{0, 1, 1, 0, 1}));

TEST(NodeShared, IsChosenOverHostsByNameOnly) {
  const auto on_two_hosts = [](const Communicator& world) {
    EXPECT_THAT(describe(*net_in(Residence::Auto, world)), HasSubstr("gathered"));
    auto within = seeded_net();
    fully_shard(within, {.mesh = Mesh::by_host(world)});
    EXPECT_THAT(describe(*within), HasSubstr("node-shared")) << "each replica is on one host";
  };
  with_ranks(4, on_two_hosts, {0, 0, 1, 1});
  const auto apart = [](const Communicator& world) {
    EXPECT_THAT(message_of<ConfigError>([&] { net_in(Residence::NodeShared, world); }), HasSubstr("the ranks are on 2 hosts"));
  };
  with_ranks(2, apart, {0, 1});
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
}  // namespace tessera::testing::node_shared_test
