#include "tessera/nn/collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/net.h"

namespace tessera::testing::collectives_test {
namespace {

using ::testing::HasSubstr;

/// Different on each rank.
at::Tensor own_values(int rank, at::IntArrayRef sizes) {
  return (at::arange(c10::multiply_integers(sizes), at::kDouble).view(sizes) + 1).mul(rank + 1).sin();
}

/// A scalar in which every value of `y` has another weight on each rank.
at::Tensor loss_of(int rank, const at::Tensor& y) {
  return (y.square() * own_values(rank + 5, y.sizes())).sum();
}

/// Compares results and gradients with those of one process that has the tensors of all ranks and the sum of all losses.
void expect_as_one_process(const std::function<at::Tensor(const at::Tensor& x, const Communicator& world)>& own,
                           const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& all)>& whole,
                           const std::vector<int64_t>& sizes) {
  with_ranks(3, [&](const Communicator& world) {
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < world.size(); rank++) all.push_back(own_values(rank, sizes).requires_grad_());
    const auto expected = whole(all);
    auto sum = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < world.size(); rank++) sum = sum + loss_of(rank, expected[static_cast<size_t>(rank)]);
    const auto gradients_of = [&](const at::Tensor& scalar) {
      auto gradients = torch::autograd::grad({scalar}, all, {}, true, true, /*allow_unused=*/true);
      for (auto& gradient : gradients) gradient = gradient.defined() ? gradient : at::zeros_like(all[0]);
      return gradients;
    };
    const auto first = gradients_of(sum);
    auto squares = at::zeros({}, at::kDouble);
    for (const auto& gradient : first) squares = squares + gradient.square().sum();
    const auto second = gradients_of(squares);

    const auto rank = static_cast<size_t>(world.rank());
    const auto x = own_values(world.rank(), sizes).requires_grad_();
    const auto y = own(x, world);
    ASSERT_EQ(y.sizes(), expected[rank].sizes());
    EXPECT_TRUE(at::allclose(y, expected[rank]));
    const auto gradient = torch::autograd::grad({loss_of(world.rank(), y)}, {x}, {}, true, true)[0];
    EXPECT_TRUE(at::allclose(gradient, first[rank])) << gradient << first[rank];
    EXPECT_TRUE(at::allclose(torch::autograd::grad({gradient.square().sum()}, {x})[0], second[rank]));
  });
}

at::Tensor sum_of(const std::vector<at::Tensor>& all) {
  return at::stack(all).sum(0);
}

TEST(Collectives, HaveTheGradientsOfTheSumOfAllLosses) {
  const auto thrice = [](const at::Tensor& tensor) { return std::vector<at::Tensor>(3, tensor); };
  expect_as_one_process([](const auto& x, const auto& world) { return nn::all_reduce(x, world); },
                        [&](const auto& all) { return thrice(sum_of(all)); }, {2, 3});
  expect_as_one_process([](const auto& x, const auto& world) { return nn::all_reduce(x.t(), world, Reduce::Mean); },
                        [&](const auto& all) { return thrice(sum_of(all).t() / 3); }, {2, 3});
  expect_as_one_process([](const auto& x, const auto& world) { return nn::broadcast(x, world, 1); },
                        [&](const auto& all) { return thrice(all[1]); }, {4});
  for (const int64_t dim : {0, 1, -1}) {
    expect_as_one_process([&](const auto& x, const auto& world) { return nn::all_gather(x, world, dim); },
                          [&](const auto& all) { return thrice(at::cat(all, dim)); }, {2, 3, 4});
  }
  expect_as_one_process([](const auto& x, const auto& world) { return nn::all_gather(x.sum(), world); },
                        [&](const auto& all) { return thrice(at::stack({all[0].sum(), all[1].sum(), all[2].sum()})); }, {2});
  for (const int64_t dim : {0, 1, -1}) {
    expect_as_one_process([&](const auto& x, const auto& world) { return nn::reduce_scatter(x, world, Reduce::Sum, dim); },
                          [&](const auto& all) { return sum_of(all).chunk(3, dim); }, {6, 3, 9});
    expect_as_one_process([&](const auto& x, const auto& world) { return nn::reduce_scatter(x, world, Reduce::Mean, dim); },
                          [&](const auto& all) { return (sum_of(all) / 3).chunk(3, dim); }, {3, 6, 3});
  }
}

TEST(Collectives, OfAShardedModelGiveTheGradientOfTheMeanLoss) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    auto plain = seeded_net();
    const auto features = nn::all_gather(net(input(world.rank())), world);
    (features.mm(features.t()).square().mean() + nn::all_reduce(net->b->weight, world).square().sum()).backward();
    const auto all = at::cat({plain(input(0)), plain(input(1))});
    (all.mm(all.t()).square().mean() + (2 * plain->b->weight).square().sum()).backward();
    for (const auto& [sharded, whole] : {std::pair(net->a->weight, plain->a->weight), std::pair(net->b->weight, plain->b->weight)})
      EXPECT_TRUE(at::allclose(full_grad(sharded), whole.grad(), 1e-5, 1e-6));
  });
}

TEST(Collectives, RefuseWhatTheyCanNotDo) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto shard = parameters(*net)[0];
    EXPECT_THAT(message_of<UsageError>([&] { nn::all_reduce(shard * 2, world); }), HasSubstr("was given a shard"));
    EXPECT_THAT(message_of<UsageError>([&] { nn::all_gather(shard * 2, world); }), HasSubstr("was given a shard"));
    const auto x = at::ones({3}).requires_grad_();
    EXPECT_THAT(message_of<UsageError>([&] { nn::all_reduce(x, world, Reduce::Max); }), HasSubstr("no gradient for a minimum or maximum"));
    EXPECT_THAT(message_of<UsageError>([&] { nn::reduce_scatter(x, world); }), HasSubstr("can't divide a dimension of size 3 among 2 ranks"));
    EXPECT_EQ(nn::all_reduce(x.detach() * (world.rank() + 1), world, Reduce::Max)[0].item<float>(), 2);
  });
}

/// Tensors of equal counts but different shapes would be combined in silence.
TEST(Collectives, CompareShapes) {
  with_ranks(3, [](const Communicator& world) {
    const auto x = at::arange(6, at::kFloat).view(world.rank() == 0 ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{3, 2});
    const auto refused = [&](const std::function<void()>& act) {
      EXPECT_THAT(message_of<DisagreementError>(act), AllOf(HasSubstr("of {2, 3}"), HasSubstr("of {3, 2}")));
    };
    refused([&] { nn::all_reduce(x, world); });
    refused([&] { nn::all_gather(x, world); });
    refused([&] { nn::broadcast(x, world); });
    refused([&] { nn::reduce_scatter(x, world, Reduce::Sum, world.rank() == 0 ? 1 : 0); });
    const auto square = at::ones({3, 3});
    EXPECT_THAT(message_of<DisagreementError>([&] { nn::all_gather(square, world, world.rank() == 0 ? 1 : 0); }), HasSubstr("along 1"));
    EXPECT_EQ(nn::all_gather(square, world, world.rank() == 0 ? -2 : 0).size(0), 9);
  });
}

TEST(Collectives, RefuseWhatIsNoTensorOrDimension) {
  with_ranks(2, [](const Communicator& world) {
    const at::Tensor none;
    for (const auto& act : {std::function([&] { nn::all_reduce(none, world); }), std::function([&] { nn::all_gather(none, world); }),
                            std::function([&] { nn::broadcast(none, world); }), std::function([&] { nn::reduce_scatter(none, world); })})
      EXPECT_THAT(message_of<UsageError>(act), HasSubstr("was given an undefined tensor"));
    const auto x = at::ones({2, 3});
    EXPECT_THAT(message_of<UsageError>([&] { nn::all_gather(x, world, 2); }), HasSubstr("dimension 2 of a tensor with sizes [2, 3]"));
    EXPECT_THAT(message_of<UsageError>([&] { nn::all_gather(x[0][0], world, 1); }), HasSubstr("dimension 1 of a tensor with sizes [1]"));
    EXPECT_THAT(message_of<UsageError>([&] { nn::reduce_scatter(x, world, Reduce::Sum, -3); }), HasSubstr("dimension -3"));
    EXPECT_THAT(message_of<UsageError>([&] { nn::reduce_scatter(x[0][0], world); }), HasSubstr("dimension 0 of a tensor with sizes []"));
  });
}

TEST(Collectives, InPlaceRefuseTensorsWithAGraph) {
  with_ranks(2, [](const Communicator& world) {
    const auto w = at::full({4}, 3.0).requires_grad_();
    const auto y = w * 1;
    const auto half = at::zeros({2}), whole = at::zeros({8});
    const auto refused = [&](const std::function<void()>& act, const std::string& name) {
      EXPECT_THAT(message_of<UsageError>(act), AllOf(HasSubstr(name + " was given a tensor that requires a gradient"),
                                                     HasSubstr("tessera::nn::" + name + "(tensor, world)")));
    };
    for (const auto& tensor : {w, y, y.view({2, 2})}) {
      refused([&] { world.all_reduce(tensor).wait(); }, "all_reduce");
      refused([&] { world.broadcast(tensor).wait(); }, "broadcast");
    }
    const Piece reads{.whole = whole, .own = y}, scatters{.whole = y, .own = half};
    refused([&] { world.all_gather(std::span(&reads, 1)).wait(); }, "all_gather");
    refused([&] { world.reduce_scatter(std::span(&scatters, 1)).wait(); }, "reduce_scatter");
    const torch::NoGradGuard no_grad;
    world.all_reduce(w).wait();
    EXPECT_EQ(w[0].item<float>(), 6);
  });
}

/// Collectives of Communicator write in place without autograd, which may have saved the values.
TEST(Collectives, InPlaceOutdateGraphsThatHaveSavedTheTensor) {
  with_ranks(2, [](const Communicator& world) {
    const auto w = at::full({4}, 3.0).requires_grad_();
    const auto x = at::ones({4}), parts = at::ones({2}), own = at::ones({2});
    const auto loss = (w * x).sum(), other = (w.narrow(0, 0, 2) * parts).sum(), gathered = (w * x.clone()).sum();
    const auto y = w.tanh();
    world.all_reduce(x).wait();
    EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
    world.broadcast(parts).wait();
    EXPECT_THAT(message_of<c10::Error>([&] { other.backward(); }), HasSubstr("modified by an inplace operation"));
    {
      const torch::NoGradGuard no_grad;
      const Piece piece{.whole = y, .own = own};
      world.all_gather(std::span(&piece, 1)).wait();
    }
    EXPECT_THAT(message_of<c10::Error>([&] { y.sum().backward(); }), HasSubstr("modified by an inplace operation"));
    gathered.backward();
  });
}

}  // namespace
}  // namespace tessera::testing::collectives_test
