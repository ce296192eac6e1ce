// tessera::recover after an exception on some ranks, and models that train in several threads.
#include <c10/core/AutogradState.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/recover.h"
#include "tessera/shard/reduction.h"
#include "tests/testing/blocks.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"

namespace tessera::testing::recover_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kBatches = 4;

/// Where the ranks lie, and how the model is divided among them.
struct Shape {
  const char* name;
  int ranks;
  Residence residence;
  Mesh (*of_root)(const Communicator& world);
  Mesh (*of_blocks)(const Communicator& world) = of_root;  // called for each block
  int reshards_to = 0;                                     // the number of ranks, after forward
  /// The last point at which a failing rank keeps all others from taking the step. Ranks wait for each other before they write shared
  /// memory, and all ranks of a shard group when they clip.
  const char* holds_up = "after backward";
  std::vector<int> host_of = {};
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << shape.name; }
};

Mesh whole(const Communicator& world) {
  return world;
}
Mesh hybrid(const Communicator& world) {
  return {world, {.replicate = 2, .shard = 2}};
}
Mesh hybrid_by_name(const Communicator& world) {
  return {world, {{"replicate", 2}, {"shard", -1}}};
}
Mesh pairs(const Communicator& world) {
  return Mesh::of_groups(world, {{0, 1}, {2, 3}});
}

constexpr auto kShared = Residence::NodeShared, kGathered = Residence::Gathered;
constexpr auto kBackward = "backward of block 0";
const Shape kShapes[] = {
    {.name = "OneAxisShared", .ranks = 3, .residence = kShared, .of_root = whole, .holds_up = "before the step"},
    {.name = "OneAxisGathered", .ranks = 3, .residence = kGathered, .of_root = whole},
    {.name = "PartlyResharded", .ranks = 4, .residence = kGathered, .of_root = whole, .reshards_to = 2},
    {.name = "HybridShared", .ranks = 4, .residence = kShared, .of_root = hybrid, .holds_up = kBackward},
    {.name = "HybridGathered", .ranks = 4, .residence = kGathered, .of_root = hybrid, .holds_up = kBackward},
    {.name = "HybridPartlyShared", .ranks = 4, .residence = kShared, .of_root = whole, .of_blocks = hybrid_by_name},
    {.name = "HybridPartlyGathered", .ranks = 4, .residence = kGathered, .of_root = whole, .of_blocks = hybrid_by_name},
    {.name = "PairsShared", .ranks = 4, .residence = kShared, .of_root = hybrid, .of_blocks = pairs, .holds_up = "forward of block 1"},
    {.name = "TwoHostsShared", .ranks = 4, .residence = kShared, .of_root = whole, .host_of = {0, 0, 1, 1}},
    {.name = "TwoHostsGathered", .ranks = 3, .residence = kGathered, .of_root = whole, .host_of = {0, 1, 1}},
    {.name = "PairsGathered", .ranks = 4, .residence = kGathered, .of_root = whole, .of_blocks = pairs},
};

/// The points of a batch at which a rank may fail, in the order in which a rank reaches them.
constexpr const char* kPoints[] = {"no_sync: forward of block 1", "no_sync: backward of block 1", "no_sync: after backward",
                                   "forward of block 0",          "forward of block 1",           "backward of block 1",
                                   kBackward,                     "after backward",               "before the step",
                                   "after the step"};

struct Failure {
  int rank, batch;
  std::string point;
};

/// A program that continues after failures.
class Program {
 public:
  Program(const Communicator& world, const Shape& shape, std::vector<Failure> failures)
      : world_(world), failures_(std::move(failures)), model_(std::make_shared<RootedBlocks>(2)) {
    const auto options = [&](const Mesh& mesh) {
      ShardOptions result{.mesh = mesh, .residence = shape.residence};
      if (shape.reshards_to > 0) result.reshard_after_forward = shape.reshards_to;
      return result;
    };
    for (const auto& block : model_->block) fully_shard(block, options(shape.of_blocks(world)));
    fully_shard(model_, options(shape.of_root(world)));
    optimizer_.emplace(parameters(*model_), optim::AdamWOptions{.lr = 0.05});
  }

  struct Result {
    std::vector<int> steps;  // the batches that it has learned from
    std::vector<at::Tensor> values = {};
    std::string end = {};  // what recover threw
  };

  Result train(const std::vector<int>& batches) {
    Result result;
    for (size_t i = 0; i < batches.size(); i++) {
      batch_ = batches[i];
      std::optional<NoSync> unsynced = no_sync(*model_);
      try {
        loss("no_sync: ").backward();
        come_to("no_sync: after backward");
        unsynced.reset();
        loss("").backward();
        come_to("after backward");
        optimizer_->clip_grad_norm(0.5);
        come_to("before the step");
        optimizer_->step();
        result.steps.push_back(batch_);
        optimizer_->zero_grad();
        come_to("after the step");
      } catch (const std::exception& error) {
        EXPECT_FALSE(failures_.empty()) << error.what();
        try {
          recover(*model_);  // perhaps inside of no_sync
        } catch (const CommError& useless) {
          result.end = useless.what();
          return result;
        }
        for (const auto& shard : parameters(*model_)) EXPECT_FALSE(shard.grad().defined());
        // A rank may hear of the failure when it is in the next batch.
        const auto last = here(torch::tensor({static_cast<int64_t>(i)}));
        world_.all_reduce(last, {.op = Reduce::Max}).wait();
        i = static_cast<size_t>(last.item<int64_t>());
      }
    }
    for (const auto& shard : parameters(*model_)) result.values.push_back(full_parameter(shard));
    return result;
  }

 private:
  bool fails_at(const std::string& point) const {
    return std::ranges::any_of(
        failures_, [&](const Failure& each) { return each.rank == world_.rank() && each.batch == batch_ && each.point == point; });
  }
  void come_to(const std::string& point) const {
    if (fails_at(point)) throw std::runtime_error("a bad batch");
  }

  at::Tensor loss(const std::string& pass) {
    auto x = numbers({5, 8}, 10 * batch_ + world_.rank() + (pass.empty() ? 0.5 : 0));
    for (size_t i = 0; i < model_->block.size(); i++) {
      const auto block = "block " + std::to_string(i);
      come_to(pass + "forward of " + block);
      x = model_->block[i]->forward(x);
      if (!fails_at(pass + "backward of " + block)) continue;
      x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a bad batch"); });
    }
    return model_->head(x).pow(2).mean();
  }

  const Communicator world_;
  const std::vector<Failure> failures_;
  const std::shared_ptr<RootedBlocks> model_;
  std::optional<optim::AdamW> optimizer_;
  int batch_ = 0;
};

/// Trains with failures. All ranks end alike: as if they had been given only the batches from which they have learned, or are told to load
/// a checkpoint. Returns whether they could continue.
bool goes_on(const Communicator& world, const Shape& shape, const std::vector<Failure>& failures) {
  const auto actual = Program(world, shape, failures).train({0, 1, 2, 3});
  const auto ended = here(torch::tensor({actual.end.empty() ? 0L : 1L, actual.end.empty() ? -0L : -1L}));
  world.all_reduce(ended, {.op = Reduce::Max}).wait();
  EXPECT_EQ(ended[0].item<int64_t>(), -ended[1].item<int64_t>()) << "some go on: " << actual.end;
  if (!actual.end.empty()) {
    EXPECT_THAT(actual.end, HasSubstr("load a checkpoint"));
    return false;
  }
  EXPECT_LT(actual.steps.size(), kBatches);
  const auto expected = Program(world, shape, {}).train(actual.steps);
  for (size_t i = 0; i < expected.values.size(); i++) {
    EXPECT_TRUE(at::equal(actual.values[i], expected.values[i]))
        << "parameter " << i << " differs by " << (actual.values[i] - expected.values[i]).abs().max().item<double>() << " after a failure "
        << failures.front().point;
  }
  return true;
}

class Recovery : public ::testing::TestWithParam<Shape> {};

TEST_P(Recovery, GoesOnAfterAFailureAtAnyPoint) {
  const auto& shape = GetParam();
  int culprit = 0;
  for (const int batch : {0, 2}) {
    for (const std::string point : kPoints) {
      culprit = (culprit + 1) % shape.ranks;
      const auto place = [](std::string_view which) { return std::ranges::find(kPoints, which) - kPoints; };
      const bool may_be_torn = place(point) > place(shape.holds_up) && point != "after the step";
      const auto program = [&](const Communicator& world) {
        EXPECT_TRUE(goes_on(world, shape, {{culprit, batch, point}}) || may_be_torn)
            << point << " of batch " << batch << " on rank " << culprit;
      };
      with_ranks(shape.ranks, program, shape.host_of);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Recovery, GoesOnAfterFailuresOfTwoRanks) {
  const auto& shape = GetParam();
  for (const auto& [one, other] : {std::pair{0, 1}, {1, 2}, {2, 0}}) {
    const auto program = [&](const Communicator& world) {
      EXPECT_TRUE(goes_on(world, shape, {{one, 1, "forward of block 0"}, {other, 1, "forward of block 1"}})) << one << " and " << other;
    };
    with_ranks(shape.ranks, program, shape.host_of);
  }
}

std::vector<Shape> shapes() {
  std::vector<Shape> all(std::begin(kShapes), std::end(kShapes));
  if (!on_cpu()) std::erase_if(all, [](const Shape& shape) { return shape.residence == kShared; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Meshes, Recovery, ::testing::ValuesIn(shapes()), ::testing::PrintToStringParamName());

TEST(Recovering, MeetsARankThatWasRefused) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world});
    if (world.rank() == 1) {
      EXPECT_THAT(message_of<UsageError>([&] { world.broadcast(at::ones({2}), 7).wait(); }), HasSubstr("rank 7 does not exist"));
    }
    recover(*net);
    net(input()).sum().backward();
  });
}

TEST(Recovering, SaysWhoRecoversToThoseWhoDoNotYet) {
  with_ranks(4, [](const Communicator& world) {
    auto net = seeded_net();
    const Mesh mesh(world, {.replicate = 2, .shard = 2});
    fully_shard(net, {.mesh = mesh});
    if (world.rank() == 1) {
      const auto text = message_of<DisagreementError>([&] { mesh.replicate().barrier({.unit = "mine"}); });
      EXPECT_THAT(text, AllOf(HasSubstr("rank 1 at operation 0: barrier of 'mine'"),
                              HasSubstr("rank 3 at operation 0: barrier of 'tessera::recover'"),
                              HasSubstr("call it on every rank, or end the program")));
    }
    recover(*net);
  });
}

TEST(Recovering, IsOfNoUseAfterDifferentSteps) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .residence = Residence::Gathered});
    net(input()).sum().backward();
    if (world.rank() == 0) {
      const torch::NoGradGuard no_grad;
      for (auto& shard : parameters(*net)) shard.mul_(1);
    }
    EXPECT_THAT(message_of<CommError>([&] { recover(*net); }), HasSubstr("load a checkpoint"));
  });
}

TEST(Recovering, ForgetsHowTheDroppedGradientsWereScaled) {
  with_ranks(2, [](const Communicator& world) {
    const auto trained = [&](bool breaks_off) {
      auto net = seeded_net();
      fully_shard(net, {.mesh = world});
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      optim::GradScaler scaler({.init_scale = 8});
      const auto backward = [&](int number, double most) {
        scaler.scale(net(input(number)).pow(2).sum()).backward();
        scaler.unscale_(optimizer);
        optimizer.clip_grad_norm(most);
      };
      if (breaks_off) {
        backward(1, 1e-6);
        recover(*net);
      }
      backward(2, 1);
      scaler.step(optimizer);
      scaler.update();
      return full_parameter(net->a->weight);
    };
    EXPECT_TRUE(at::equal(trained(true), trained(false)));
  });
}

TEST(Recovering, ChangesNothingWhereNothingWasWrong) {
  with_ranks(3, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto expected = net(input()).detach();
    recover(*net);
    EXPECT_TRUE(at::equal(net(input()), expected));
  });
}

TEST(Recovering, MeetsInTheWorldOfARootWithoutParameters) {
  with_ranks(4, [](const Communicator& world) {
    auto net = seeded_net();
    for (const auto& child : net->children()) fully_shard(child, {.mesh = pairs(world)});
    fully_shard(net, {.mesh = world});
    const auto norm = [&] {
      net(input()).pow(2).sum().backward();
      return grad_norm(parameters(*net)).item<double>();
    };
    const double expected = norm();
    const auto again = [&] { grad_norm(parameters(*net)); };
    if (world.rank() != 0) (void)message_of<CommError>(again);  // which rank 0 does not compute
    recover(*net);
    EXPECT_NEAR(norm(), expected, 1e-4);
  });
}

double trained(const Communicator& world, double shift) {
  auto net = seeded_net();
  fully_shard(net, {.mesh = world, .residence = Residence::Gathered});
  optim::AdamW optimizer(parameters(*net), {.lr = 0.05});
  double loss = 0;
  for (int step = 0; step < 30; step++) {
    const auto value = (net(input(world.rank())) + shift).pow(2).mean();
    value.backward();
    optimizer.step();
    optimizer.zero_grad();
    loss = value.item<double>();
  }
  return loss;
}

TEST(Threads, TrainModelsEachOverAGroupOfItsOwn) {
  with_ranks(2, [](const Communicator& world) {
    const double expected[] = {trained(world, 0), trained(world, 1)};
    const Communicator groups[] = {world.duplicate(), world.duplicate()};
    double actual[2];
    {
      const auto train_in_a_thread = [&](int number) {
        // libtorch has only one thread for a device, in which one backward pass would wait for the other.
        c10::AutogradState::get_tls_state().set_multithreading_enabled(on_cpu());
        actual[number] = trained(groups[number], number);
      };
      const std::jthread one(train_in_a_thread, 0), other(train_in_a_thread, 1);
    }
    EXPECT_EQ(actual[0], expected[0]);
    EXPECT_EQ(actual[1], expected[1]);
  });
}

TEST(Threads, ThatShareAGroupAreToldWhatTheyNeed) {
  with_ranks(2, [](const Communicator& world) {
    std::thread([&] { world.barrier(); }).join();
    const auto text = message_of<CommError>([&] { world.barrier({.unit = world.rank() == 0 ? "one" : "other"}); });
    EXPECT_THAT(text, HasSubstr("world.duplicate()"));
  });
}

}  // namespace
}  // namespace tessera::testing::recover_test
