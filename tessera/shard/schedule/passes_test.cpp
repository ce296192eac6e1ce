// Forward and backward passes under unusual conditions: without gradients, of two models at once, after an exception.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/net.h"

namespace tessera::testing::passes_test {
namespace {

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
    auto unsharded = seeded_net();
    const auto mixed = [&](Net& a, Net& b) { return (a(input()) * b->c(torch::tanh(a->b(torch::tanh(b->a(input())))))).sum(); };
    auto reference = seeded_net();
    mixed(unsharded, reference).backward();
    mixed(first, second).backward();
    EXPECT_TRUE(at::allclose(full_grad(parameters(*first)[2]), unsharded->b->weight.grad(), 1e-5, 1e-6));
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
    auto unsharded = seeded_net();
    mean_over_ranks(world, [&](int rank) { return unsharded(input(rank)).sum(); }).backward();
    for (size_t i = 0; i < 6; i++) {
      EXPECT_TRUE(at::allclose(full_grad(parameters(*net)[i]), unsharded->parameters()[i].grad(), 1e-5, 1e-6)) << i;
    }
  });
}

}  // namespace
}  // namespace tessera::testing::passes_test
