// GradScaler: float16 training against a scaler by hand, agreement of ranks, and its errors.
#include "tessera/optim/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/notes.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::grad_scaler_test {
namespace {

using optim::GradScaler;
using optim::GradScalerOptions;
using ::testing::HasSubstr;

constexpr auto kInf = std::numeric_limits<float>::infinity();

Net half_net(const Communicator& world, Residence residence = Residence::Auto) {
  auto net = seeded_net();
  fully_shard(net, {.mesh = world, .mixed_precision = {.param_dtype = at::kHalf}, .residence = residence});
  return net;
}

at::Tensor loss_of(Net& net, const at::Tensor& x) {
  return net(x).to(at::kFloat).pow(2).mean();
}

/// Replicated training in float16 with float32 master weights and a scaler by hand: the same casts and the same order of sums.
class ByHand {
 public:
  ByHand(const Communicator& world, double lr) : world_(world), net_(seeded_net()), lr_(lr) {}
  void step(double scale, int number) {
    const torch::NoGradGuard no_grad;
    const auto masters = net_->parameters();
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < world_.size(); rank++) {
      auto copy = seeded_net();
      for (size_t i = 0; i < masters.size(); i++) copy->parameters()[i].copy_(masters[i]);
      copy->to(at::kHalf);
      const at::AutoGradMode grad(true);
      (loss_of(copy, input(rank + number).to(at::kHalf)) * scale).backward();
      const auto gradients = copy->parameters();
      for (size_t i = 0; i < gradients.size(); i++) {
        if (rank == 0)
          sums.push_back(gradients[i].grad().to(at::kFloat));
        else
          sums[i] = sums[i] + gradients[i].grad().to(at::kFloat);
      }
    }
    for (size_t i = 0; i < masters.size(); i++) masters[i].sub_(sums[i] / world_.size() / scale, lr_);
  }
  at::Tensor weight() const { return net_->b->weight; }

 private:
  const Communicator& world_;
  Net net_;
  double lr_;
};

template <class MakeOptimizer>
void expect_same_as_by_hand(Residence residence, const MakeOptimizer& make) {
  with_ranks(2, [&](const Communicator& world) {
    auto net = half_net(world, residence);
    const auto optimizer = make(*net);
    GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
    ByHand expected(world, 0.1);
    double scale = 1024;
    for (int step = 0; step < 5; step++) {
      EXPECT_EQ(scaler.get_scale(), scale);
      scaler.scale(loss_of(net, input(world.rank() + step))).backward();
      EXPECT_TRUE(scaler.step(*optimizer));
      scaler.update();
      optimizer->zero_grad();
      expected.step(scale, step);
      if (step % 2 == 1) scale *= 2;
    }
    EXPECT_TRUE(at::allclose(full_parameter(net->b->weight), expected.weight(), 1e-4, 1e-5));
    EXPECT_FALSE(at::allclose(expected.weight(), seeded_net()->b->weight, 1e-3, 1e-3));
  });
}

TEST(GradScaler, TrainsAsAScalerByHand) {
  for (const auto residence : residences()) {
    expect_same_as_by_hand(residence, [](const Net::ContainedType& net) {
      return std::make_unique<optim::SGD>(parameters(net), optim::SgdOptions{.lr = 0.1});
    });
    expect_same_as_by_hand(residence,
                           [](const Net::ContainedType& net) { return std::make_unique<torch::optim::SGD>(parameters(net), 0.1); });
  }
}

/// Expects that all ranks skip a step if rank 1 alone has `value` in its gradients.
template <class MakeOptimizer>
void expect_all_skip(const MakeOptimizer& make, float value) {
  with_ranks(2, [&](const Communicator& world) {
    auto net = half_net(world);
    const auto optimizer = make(*net);
    GradScaler scaler({.init_scale = 8});
    const auto before = full_parameter(net->b->weight).clone();
    for (int step = 0; step < 3; step++) {
      const bool bad = step == 1;
      scaler.scale(loss_of(net, input(world.rank()))).backward();
      if (bad && world.rank() == 1) {
        const torch::NoGradGuard no_grad;
        parameters(*net).back().mutable_grad().fill_(value);
      }
      const auto at_start = full_parameter(net->c->bias).clone();
      EXPECT_EQ(scaler.step(*optimizer), !bad);
      EXPECT_EQ(at::equal(full_parameter(net->c->bias), at_start), bad);
      scaler.update();
      optimizer->zero_grad();
      EXPECT_EQ(scaler.get_scale(), step == 0 ? 8 : 4);
    }
    EXPECT_TRUE(full_parameter(net->b->weight).isfinite().all().item<bool>());
    EXPECT_FALSE(at::equal(full_parameter(net->b->weight), before));
  });
}

TEST(GradScaler, SkipsOnAllRanksWhatIsNotFiniteOnOne) {
  for (const float value : {kInf, std::nanf("")}) {
    expect_all_skip([](const Net::ContainedType& net) { return std::make_unique<optim::AdamW>(parameters(net), optim::AdamWOptions{}); },
                    value);
    expect_all_skip([](const Net::ContainedType& net) { return std::make_unique<torch::optim::AdamW>(parameters(net), 1e-2); }, value);
  }
}

TEST(GradScaler, FindsWhatOverflowsInFloat16) {
  with_ranks(2, [](const Communicator& world) {
    auto net = half_net(world);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    GradScaler scaler({.init_scale = 1e30});
    int steps = 0;
    for (int step = 0; step < 200 && steps < 2; step++) {
      scaler.scale(loss_of(net, input(world.rank()))).backward();
      steps += scaler.step(optimizer) ? 1 : 0;
      scaler.update();
      optimizer.zero_grad();
    }
    EXPECT_EQ(steps, 2);
    EXPECT_LT(scaler.get_scale(), 1e8);
    EXPECT_TRUE(full_parameter(net->b->weight).isfinite().all().item<bool>());
  });
}

TEST(GradScaler, UnscalesBeforeClipping) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net(), reference = seeded_net();
    fully_shard(net, {.mesh = world});
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    GradScaler scaler;
    scaler.scale(loss_of(net, input())).backward();
    loss_of(reference, input()).backward();
    scaler.unscale_(optimizer);
    EXPECT_NEAR(optimizer.clip_grad_norm(0.01).item<double>(), torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.01), 1e-5);
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(at::allclose(full_parameter(net->b->weight), reference->b->weight - 0.1 * reference->b->weight.grad(), 1e-5, 1e-6));
  });
}

TEST(GradScaler, IsANoteOfACheckpoint) {
  at::Tensor parameter = at::ones({2}).set_requires_grad(true);
  optim::SGD optimizer({parameter}, {.lr = 0.1});
  GradScaler scaler({.init_scale = 3.25, .growth_factor = 4, .growth_interval = 2});
  const auto iterate = [&](GradScaler& with) {
    parameter.mutable_grad() = at::ones({2});
    with.step(optimizer);
    with.update();
    return with.get_scale();
  };
  EXPECT_EQ(iterate(scaler), 3.25);
  checkpoint::Notes notes{{"scaler", scaler}};
  auto loaded = notes.at("scaler").as<GradScaler>();
  EXPECT_EQ(iterate(loaded), 13);  // the second one in a row
  EXPECT_THAT(message_of<UsageError>([] { GradScaler::load("grad-scaler-1 4 2"); }), HasSubstr("does not describe a GradScaler"));
}

TEST(GradScaler, DoesNothingIfItIsNotEnabled) {
  at::Tensor parameter = at::ones({2}).set_requires_grad(true);
  optim::SGD optimizer({parameter}, {.lr = 1});
  GradScaler scaler({.enabled = false});
  EXPECT_EQ(scaler.scale(at::ones({})).item<float>(), 1);
  parameter.mutable_grad() = at::full({2}, kInf);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(GradScaler, SaysWhatIsCalledInTheWrongOrder) {
  at::Tensor parameter = at::ones({2}).set_requires_grad(true);
  optim::SGD optimizer({parameter}, {.lr = 0.1});
  torch::optim::SGD plain({at::ones({2}, at::kHalf).set_requires_grad(true)}, 0.1);
  GradScaler scaler;
  EXPECT_THAT(message_of<UsageError>([&] { scaler.update(); }), HasSubstr("no gradients were checked"));
  parameter.mutable_grad() = at::ones({2});
  scaler.unscale_(optimizer);
  EXPECT_THAT(message_of<UsageError>([&] { scaler.unscale_(optimizer); }), HasSubstr("was called twice"));
  scaler.step(optimizer);
  EXPECT_THAT(message_of<UsageError>([&] { scaler.unscale_(optimizer); }), HasSubstr("was called after step()"));
  EXPECT_THAT(message_of<UsageError>([&] { scaler.step(optimizer); }), HasSubstr("step was called twice"));
  plain.param_groups()[0].params()[0].mutable_grad() = at::ones({2}, at::kHalf);
  EXPECT_THAT(message_of<UsageError>([&] { scaler.step(plain); }), HasSubstr("float16 can't be unscaled"));
  EXPECT_THAT(message_of<UsageError>([] { GradScaler({.growth_factor = 0.5}); }), HasSubstr("growth_factor 0.5"));
}

TEST(GradScaler, GrowsOnlyIfTheGradientsOfAllOptimizersAreFinite) {
  at::Tensor a = at::ones({2}).set_requires_grad(true), b = at::ones({2}).set_requires_grad(true);
  optim::SGD first({a}, {.lr = 0.1}), second({b}, {.lr = 0.1});
  for (const bool first_overflows : {true, false}) {
    GradScaler scaler({.init_scale = 8});
    a.mutable_grad() = at::full({2}, first_overflows ? kInf : 1);
    b.mutable_grad() = at::full({2}, first_overflows ? 1 : kInf);
    scaler.step(first);
    scaler.step(second);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
  }
}

}  // namespace
}  // namespace tessera::testing::grad_scaler_test
