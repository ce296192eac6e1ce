// Norms of gradients: a norm that the reduction has computed equals the norm of the full gradients, and is dropped as soon as a gradient
// may have changed.
#include "tessera/shard/norms.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/shard/local.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tests/testing/blocks.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::norms_test {
namespace {

/// The norm of all full gradients.
double norm_of_whole(const torch::nn::Module& model, double p = 2) {
  std::vector<at::Tensor> all;
  for (const auto& shard : parameters(model)) {
    if (shard.grad().defined()) all.push_back(full_grad(shard).flatten().to(at::kDouble));
  }
  return at::cat(all).norm(p).item<double>();
}

/// The number of units whose sum of squares the reduction has computed.
int known(const torch::nn::Module& model) {
  int units = 0;
  const StorageTag* last = nullptr;
  for (const auto& shard : parameters(model)) {
    const auto* tag = shard.grad().defined() ? tag_of(shard.grad()) : nullptr;
    if (tag != nullptr && tag != last && tag->squares) units++;
    last = tag;
  }
  return units;
}

class Norms : public ::testing::TestWithParam<std::tuple<Residence, int>> {
 protected:
  static constexpr int kUnits = 3;

  /// Calls `look` on each rank after a backward pass whose reduction knew that norms are wanted.
  static void each_rank(const std::function<void(Blocks& model)>& look, MixedPrecision precision = {}) {
    const auto [residence, ranks] = GetParam();
    with_ranks(ranks, [&, residence = residence](const Communicator& world) {
      Blocks model(kUnits);
      const ShardOptions options{.mesh = world, .mixed_precision = precision, .residence = residence};
      for (const auto& block : model.block) fully_shard(block, options);
      fully_shard(model, options);
      for (int pass = 0; pass < 2; pass++) {
        for (auto& shard : parameters(model)) shard.mutable_grad() = at::Tensor();
        model.forward(numbers({5, 8}, world.rank())).pow(2).mean().backward();
        EXPECT_EQ(known(model), pass > 0 && compat::kTellsOfWrites ? kUnits : 0);
        EXPECT_NEAR(grad_norm(parameters(model)).item<double>(), norm_of_whole(model), 1e-5 * norm_of_whole(model));
      }
      look(model);
    });
  }

  static void expect_right(const Blocks& model, int known_units, double p = 2) {
    EXPECT_EQ(known(model), compat::kTellsOfWrites ? known_units : 0);
    const auto expected = norm_of_whole(model, p);
    EXPECT_NEAR(grad_norm(parameters(model), {.p = p}).item<double>(), expected, 1e-5 * expected);
  }
};

TEST_P(Norms, ComeWithTheReduction) {
  each_rank([](Blocks& model) {
    expect_right(model, kUnits);
    expect_right(model, kUnits, 1);
    expect_right(model, kUnits, 3);
    expect_right(model, kUnits, std::numeric_limits<double>::infinity());
  });
}

/// A run that resumes clips its first gradients without the squares of a reduction, and must learn what the run that saved would have.
TEST_P(Norms, HaveTheSameBitsWithoutTheReduction) {
  each_rank([](Blocks& model) {
    for (int pass = 0; pass < 20; pass++) {
      for (auto& shard : parameters(model)) shard.mutable_grad() = at::Tensor();
      model.forward(numbers({5, 8}, pass)).pow(2).mean().backward();
      const auto norm = grad_norm(parameters(model)).item<float>();
      for (const auto& shard : parameters(model)) shard.grad().mul_(1);
      EXPECT_EQ(known(model), 0);
      EXPECT_EQ(grad_norm(parameters(model)).item<float>(), norm) << pass;
    }
  });
}

TEST_P(Norms, ComeWithTheReductionOfNarrowGradients) {
  each_rank([](Blocks& model) { expect_right(model, kUnits); }, {.param_dtype = at::kBFloat16});
}

TEST_P(Norms, AreForgottenWhenAnOperatorWrites) {
  each_rank([](Blocks& model) {
    parameters(model).front().grad().mul_(3);
    expect_right(model, kUnits - 1);
    const auto before = full_grad(parameters(model)[2]);
    const auto norm = clip_grad_norm(parameters(model), 1e-3).item<double>();
    expect_right(model, 0);
    EXPECT_NEAR(grad_norm(parameters(model)).item<double>(), 1e-3, 1e-5);
    EXPECT_TRUE(at::allclose(full_grad(parameters(model)[2]), before * (1e-3 / (norm + 1e-6)), 1e-4, 1e-9));  // by torch's formula
  });
}

TEST_P(Norms, AreForgottenWhenARawPointerMayWrite) {
  if (!on_cpu()) GTEST_SKIP() << "host memory alone";
  each_rank([](Blocks& model) {
    for (const auto& shard : parameters(*model.block[1])) {
      auto gradient = shard.grad();
      auto* const values = gradient.data_ptr<float>();
      for (int64_t i = 0; i < gradient.numel(); i++) values[i] += 2;
    }
    expect_right(model, kUnits - 1);
  });
}

TEST_P(Norms, StayWhenSomebodyOnlyLooks) {
  each_rank([](Blocks& model) {
    for (const auto& shard : parameters(model)) {
      (void)shard.grad().const_data_ptr<float>();
      (void)(shard.grad() + 1);
    }
    expect_right(model, kUnits);
  });
}

TEST_P(Norms, AreForgottenWhenGradientsAddUp) {
  each_rank([](Blocks& model) {
    model.forward(numbers({5, 8}, 7)).pow(2).mean().backward();
    expect_right(model, 0);
  });
}

TEST_P(Norms, OfSomeParametersAreThoseOfSome) {
  each_rank([](Blocks& model) {
    const auto all = parameters(model);
    const std::vector<at::Tensor> some(all.begin() + 1, all.end());
    const auto first = full_grad(all.front()).to(at::kDouble).norm().item<double>(), whole = norm_of_whole(model);
    EXPECT_NEAR(grad_norm(some).item<double>(), std::sqrt(whole * whole - first * first), 1e-5 * whole);
    EXPECT_NEAR(grad_norm(std::vector<at::Tensor>{all.front(), all.front()}).item<double>(), first, 1e-5 * first);
    // A gradient that the program has assigned is not in the known sum of squares of its unit.
    auto shard = all.back();
    shard.mutable_grad() = at::ones_like(shard.grad());
    const auto expected = norm_of_whole(model);
    EXPECT_NEAR(grad_norm(all).item<double>(), expected, 1e-5 * expected);
  });
}

TEST_P(Norms, LeaveOutWhatIsNotTrainedAnyMore) {
  each_rank([](Blocks& model) {
    for (auto& shard : parameters(model)) shard.mutable_grad() = at::Tensor();
    const auto loss = model.forward(numbers({5, 8}, 2)).pow(2).mean();
    parameters(model).front().requires_grad_(false);  // after forward: its gradient is reduced, but the shard does not get it
    loss.backward();
    EXPECT_FALSE(parameters(model).front().grad().defined());
    const auto expected = norm_of_whole(model);
    EXPECT_NEAR(grad_norm(parameters(model)).item<double>(), expected, 1e-5 * expected);
  });
}

TEST_P(Norms, OfInfiniteGradientsAreNotFinite) {
  each_rank([](Blocks& model) {
    for (auto& shard : parameters(model)) shard.mutable_grad() = at::Tensor();
    (model.forward(numbers({5, 8}, 2)) * std::numeric_limits<float>::infinity()).sum().backward();
    EXPECT_FALSE(std::isfinite(grad_norm(parameters(model)).item<double>()));
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Norms, ::testing::Combine(::testing::ValuesIn(residences()), ::testing::Values(1, 2, 3)));

/// The gradient norm of a sharded model after two backward passes; the second reduction computes the sums of squares.
double norm_after_two_passes(const Blocks& model, const at::Tensor& x) {
  at::Tensor norm;
  for (int pass = 0; pass < 2; pass++) {
    for (auto& shard : parameters(model)) shard.mutable_grad() = at::Tensor();
    const_cast<Blocks&>(model).forward(x).pow(2).mean().backward();
    norm = grad_norm(parameters(model));
  }
  return norm.item<double>();
}

TEST_P(Norms, AreNotNeededToFindWhatIsNotFinite) {
  each_rank([](Blocks& model) {
    const auto shards = parameters(model);
    EXPECT_TRUE(gradients_are_finite(shards));
    shards.back().grad().fill_(1e30);  // its square is infinite in float32
    EXPECT_TRUE(gradients_are_finite(shards));
    shards.back().grad().fill_(-std::numeric_limits<float>::infinity());
    EXPECT_FALSE(gradients_are_finite(shards));
    // The infinite gradients below come from the reduction.
    for (const auto& shard : shards) shard.mutable_grad() = at::Tensor();
    model.forward(numbers({5, 8}) * 1e25).sum().mul(1e25).backward();
    EXPECT_TRUE(gradients_are_finite(shards));
    model.forward(numbers({5, 8})).mul(std::numeric_limits<float>::infinity()).sum().backward();
    EXPECT_FALSE(gradients_are_finite(shards));
  });
}

TEST(NormsOfAnyUnit, AreThoseOfTheWholeModel) {
  for (const auto residence : residences()) {
    with_ranks(4, [&](const Communicator& world) {
      // Ranks 0 and 1 have one batch, ranks 2 and 3 another, so the gradient is the mean over both batches.
      const auto x = numbers({5, 8}, world.rank() / 2);
      Blocks whole(2);
      ((whole.forward(numbers({5, 8}, 0)).pow(2).mean() + whole.forward(numbers({5, 8}, 1)).pow(2).mean()) / 2).backward();
      std::vector<at::Tensor> gradients;
      for (const auto& parameter : whole.parameters()) gradients.push_back(parameter.grad().flatten());
      const auto expected = at::cat(gradients).norm().item<double>();
      for (const auto& options : {ShardOptions{.mesh = Mesh(world, {.replicate = 2, .shard = 2}), .residence = residence},
                                  ShardOptions{.mesh = world, .residence = residence},
                                  ShardOptions{.mesh = world, .listing = Listing::Flat, .residence = residence}}) {
        Blocks model(2);
        for (const auto& block : model.block) fully_shard(block, options);
        fully_shard(model, options);
        EXPECT_NEAR(norm_after_two_passes(model, x), expected, 1e-5 * expected);
      }
    });
  }
}

TEST(NormsOfAnyUnit, LeaveOutWhatAPassDidNotUseAndAddUpDtypes) {
  with_ranks(3, [](const Communicator& world) {
    Blocks model(2), whole(2);
    for (auto* each : {&model, &whole}) each->block[1]->b->to(at::kDouble);
    fully_shard(model.block[0], {.mesh = world});
    fully_shard(model.block[1], {.mesh = world});
    fully_shard(model, {.mesh = world});
    const auto loss = [](Blocks& blocks) {
      const auto x = numbers({5, 8}, 1);
      return blocks.block[0]->a->forward(x).pow(2).mean() +  // block0.b is left out
             blocks.block[1]->b->forward(at::tanh(blocks.block[1]->a->forward(x)).to(at::kDouble)).pow(2).mean();
    };
    loss(whole).backward();
    double expected = 0;
    for (const auto& parameter : whole.parameters()) {
      if (parameter.grad().defined()) expected += parameter.grad().to(at::kDouble).square().sum().item<double>();
    }
    for (int pass = 0; pass < 2; pass++) {
      for (auto& shard : parameters(model)) shard.mutable_grad() = at::Tensor();
      loss(model).backward();
      EXPECT_NEAR(grad_norm(parameters(model)).item<double>(), std::sqrt(expected), 1e-5 * std::sqrt(expected)) << pass;
    }
  });
}

/// Large gradients are packed and added up by streaming stores, in several pieces.
TEST(LargeGradients, AreThoseOfTheWholeModel) {
  for (const auto residence : residences()) {
    with_ranks(2, [&](const Communicator& world) {
      torch::nn::Linear layer(703, 611);  // of 1.7 MB
      fill_with_numbers(*layer);
      const auto columns = layer->weight.detach().t().contiguous().t();  // other strides than its gradient has
      for (const bool transposed : {false, true}) {
        torch::nn::Linear whole(703, 611), sharded(703, 611);
        for (auto& each : {whole, sharded}) {
          each->weight.set_data(transposed ? columns.clone() : layer->weight.detach().clone());
          each->bias.set_data(layer->bias.detach().clone());
        }
        fully_shard(sharded, {.mesh = world, .residence = residence});
        const auto x = numbers({3, 703}, 1);
        for (auto& each : {whole, sharded}) torch::nn::Linear(each)->forward(x).pow(2).mean().backward();
        for (size_t i = 0; i < 2; i++) {
          EXPECT_TRUE(at::equal(full_grad(parameters(*sharded)[i]), whole->parameters()[i].grad())) << i;
        }
        const auto expected = norm_of_whole(*sharded);
        EXPECT_NEAR(grad_norm(parameters(*sharded)).item<double>(), expected, 1e-5 * expected);
      }
    });
  }
}

/// A hook that runs in backward may read gradients by operators, which wait for the reduction. A raw pointer would show unfinished values.
TEST(GradientsOnTheirWay, AreGuarded) {
  with_ranks(2, [](const Communicator& world) {
    auto model = std::make_shared<Blocks>(3);
    for (const auto& block : model->block) fully_shard(block, {.mesh = world});
    fully_shard(model, {.mesh = world});
    std::string error;
    auto shard = parameters(*model->block[2]).front();
    shard.register_hook([&](const at::Tensor& gradient) {
      error = message_of<c10::Error>([&] { (void)gradient.const_data_ptr<float>(); });
      EXPECT_TRUE(at::isfinite(to_local(gradient)).all().item<bool>());
      EXPECT_NO_THROW((void)gradient.const_data_ptr<float>());
    });
    model->forward(numbers({5, 8}, world.rank())).pow(2).mean().backward();
    EXPECT_THAT(error, ::testing::HasSubstr("gradients of unit 'block2' are still being reduced"));
    EXPECT_NO_THROW((void)shard.grad().data_ptr<float>());
  });
}

TEST(ClipGradNorm, CountsTiedParametersOnce) {
  with_ranks(2, [](const Communicator& world) {
    auto model = seeded_net();
    model->c = model->replace_module("c", model->b);
    fully_shard(model, {.mesh = world});
    model->b(numbers({3, model->b->options.in_features()}, world.rank())).sum().backward();
    EXPECT_GT(model->parameters().size(), parameters(*model).size());
    const auto norm = clip_grad_norm(model->parameters(), 0.5);
    EXPECT_NEAR(grad_norm(parameters(*model)).item<double>(), 0.5, 1e-4);
    EXPECT_GT(norm.item<double>(), 0.5);
  });
}

TEST(ClipGradNorm, RefusesWhatIsNoBound) {
  with_ranks(1, [](const Communicator& world) {
    auto model = seeded_net();
    fully_shard(model, {.mesh = world});
    for (const double bound : {-1.0, std::nan("")}) {
      EXPECT_THAT([&] { clip_grad_norm(parameters(*model), bound); },
                  ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("give a number of at least 0")));
    }
  });
}

TEST(ClipGradValue, LimitsEachValue) {
  with_ranks(3, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world});
    loss_of(*model, world.rank()).backward();
    clip_grad_value(parameters(*model), 0.01);
    const auto expected = whole_after(3, {0});
    for (size_t i = 0; i < parameters(*model).size(); i++) {
      EXPECT_TRUE(at::allclose(full_grad(parameters(*model)[i]), expected.parameters()[i].grad().clamp(-0.01, 0.01), 1e-6, 1e-6));
    }
    EXPECT_THAT([&] { clip_grad_value(parameters(*model), -1); },
                ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("-1 is not a bound")));
  });
}

TEST(Clipping, ByAFactorThatIsTooSmallForTheDtypeOfTheGradients) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    const auto weight = at::ones({4}, dtype).set_requires_grad(true);
    weight.mutable_grad() = at::full({4}, std::ldexp(1, 14), dtype);
    const std::vector<at::Tensor> parameters = {weight};
    (void)clip_grad_norm(parameters, std::ldexp(1, -11));
    EXPECT_TRUE(at::allclose(weight.grad().to(at::kFloat), at::full({4}, std::ldexp(1, -12)))) << dtype;
  }
}

}  // namespace
}  // namespace tessera::testing::norms_test
