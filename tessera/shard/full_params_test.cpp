// From shards to full tensors: full_params, full_state, flat listing, and which part of a parameter a shard is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/local.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/training.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::full_params_test {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

TEST(FullParams, CanBeReadAndWritten) {
  with_ranks(3, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto original = seeded_net();
    {
      const auto guard = full_params(*net);
      const auto& weight = net->a->weight;
      EXPECT_TRUE(at::equal(at::from_blob(weight.data_ptr(), weight.sizes(), original->a->weight.options()), original->a->weight));
    }
    {
      const auto guard = full_params(*net, Access::Write);
      const torch::NoGradGuard no_grad;
      net->a->weight.fill_(0.5);
      for (const auto& read : {std::function([&] { full_parameter(net->a->weight); }), std::function([&] { full_state(*net); }),
                               std::function([&] { full_tensor(*net, "a.weight"); })}) {
        EXPECT_THAT(message_of<UsageError>(read), HasSubstr("reaches the shards of unit"));
      }
    }
    EXPECT_TRUE(at::equal(full_parameter(parameters(*net)[0]), at::full({10, 6}, 0.5)));
    EXPECT_TRUE(at::equal(full_parameter(parameters(*net)[1]), original->a->bias));
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(net->a(at::ones({1, 6})), at::linear(at::ones({1, 6}), at::full({10, 6}, 0.5), original->a->bias)));
  });
}

TEST(FullParams, OfAReaderAroundAWriterLeaveWhatTheShardsHave) {
  with_ranks(3, [](const Communicator& world) {
    for (const auto residence : residences()) {
      auto net = seeded_net();
      fully_shard(net, {.mesh = world, .residence = residence});
      const torch::NoGradGuard no_grad;
      {
        const auto reads = full_params(*net);
        const auto writes = full_params(*net, Access::Write);
        net->b->weight.fill_(world.rank());
      }
      const auto expected = full_parameter(net->b->weight);
      ASSERT_NE(expected.min().item<float>(), expected.max().item<float>()) << "the unit lies on one rank";
      EXPECT_TRUE(at::equal(net->b->weight.clone(), expected));
    }
  });
}

TEST(FullParams, ForWritingHaveTheDtypeOfTheShards) {
  with_ranks(3, [](const Communicator& world) {
    for (const auto residence : residences()) {
      auto net = seeded_net();
      fully_shard(net, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}, .residence = residence});
      const torch::NoGradGuard no_grad;
      const auto copy = net->b->weight;
      const auto before = full_parameter(copy);
      for (int round = 0; round < 2; round++) {
        {
          const auto reads = full_params(*net);
          EXPECT_EQ(copy.scalar_type(), at::kBFloat16);
          const auto seen =
              at::from_blob(const_cast<void*>(copy.const_data_ptr()), copy.sizes(), at::TensorOptions(copy.device()).dtype(at::kBFloat16));
          const auto expected = seen.clone();
          const auto writes = full_params(*net, Access::Write);
          EXPECT_TRUE(at::equal(seen, expected)) << "raw pointers of the outer guard";
          {
            const auto again = full_params(*net->b, Access::Write);
            EXPECT_TRUE(at::equal(copy, net->b->weight));
            copy.mul_(1.001);
          }
          EXPECT_EQ(copy.scalar_type(), at::kFloat);
          copy.sub_(1e-5);
        }
        EXPECT_EQ(copy.scalar_type(), at::kBFloat16);
        EXPECT_TRUE(at::equal(copy.clone(), full_parameter(copy).to(at::kBFloat16)));
      }
      EXPECT_TRUE(at::equal(full_parameter(copy), before.mul(1.001).sub(1e-5).mul(1.001).sub(1e-5)));
    }
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
    EXPECT_TRUE(at::equal(full_tensor(*net, "b.bias"), original->b->bias));
    EXPECT_EQ(full_tensor(*net, "b.bias", Ranks::First).defined(), world.rank() == 0);
    EXPECT_THAT(message_of<UsageError>([&] { (void)full_tensor(*net, "b.bais"); }), HasSubstr("'b.bais'"));
    EXPECT_EQ(full_parameter(parameters(*net)[0], Ranks::First).defined(), world.rank() == 0);
    net(input()).sum().backward();
    EXPECT_EQ(full_grad(parameters(*net)[0], Ranks::First).defined(), world.rank() == 0);
  });
}

TEST(FullState, IsNoMixtureOfWhatTheRanksBrought) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    {
      const torch::NoGradGuard no_grad;
      net->b->weight.add_(world.rank());
    }
    for (const auto& child : net->children()) fully_shard(child, {.mesh = world});
    fully_shard(net, {.mesh = world});
    const auto refusal = HasSubstr("different parameters for unit 'b'");
    EXPECT_THAT(message_of<UsageError>([&] { (void)full_state(*net); }), refusal);
    EXPECT_THAT(message_of<UsageError>([&] { (void)full_tensor(*net, "b.bias"); }), refusal);
    EXPECT_THAT(message_of<UsageError>([&] { (void)full_parameter(parameters(*net)[2]); }), refusal);
    EXPECT_TRUE(full_tensor(*net, "a.bias").defined());
  });
}

TEST(FullState, OfOneNameLooksAtNoOtherUnit) {
  with_ranks(3, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto guard = full_params(*net->a, Access::Write);
    EXPECT_TRUE(at::equal(full_tensor(*net, "b.bias"), seeded_net()->b->bias));
    EXPECT_THAT(message_of<UsageError>([&] { (void)full_tensor(*net, "a.bias"); }), HasSubstr("reaches the shards of unit"));
  });
}

TEST(FullState, HasTheBuffersOfRankZeroUnlessAskedOtherwise) {
  with_ranks(3, [](const Communicator& world) {
    nn::Sequential model(nn::Linear(2, 2), nn::BatchNorm1d(2));
    const auto mean_with = [&](auto... more) { return full_state(*model, more...).at("1.running_mean")[1].template item<float>(); };
    model[1]->as<nn::BatchNorm1d>()->running_mean.fill_(world.rank());
    EXPECT_EQ(mean_with(), world.rank());  // not sharded, so no other rank takes part
    fully_shard(model, {.mesh = world, .start = Start::FromRank0});
    EXPECT_EQ(mean_with(), 0);
    EXPECT_EQ(mean_with(Ranks::All, BufferSync::Mean), 1);
    EXPECT_EQ(mean_with(Ranks::All, BufferSync::None), world.rank());
    EXPECT_EQ(full_tensor(*model, "1.running_mean")[0].item<float>(), 0);
    EXPECT_EQ(model[1]->as<nn::BatchNorm1d>()->running_mean[0].item<float>(), world.rank());  // the module's own buffer does not change
  });
}

TEST(Members, StandForTheirShards) {
  for (const auto listing : {Listing::ByName, Listing::Flat}) {
    with_ranks(3, [&](const Communicator& world) {
      auto net = seeded_net();
      auto original = seeded_net();
      for (const auto& child : net->children()) fully_shard(child, {.mesh = world, .listing = listing});
      fully_shard(net, {.mesh = world, .listing = listing});
      EXPECT_FALSE(full_grad(net->a->weight).defined());
      for (auto* each : {&net, &original}) (*each)(input()).pow(2).sum().backward();
      EXPECT_TRUE(at::equal(full_parameter(net->a->weight), original->a->weight));
      EXPECT_TRUE(at::equal(full_parameter(net->b->bias), original->b->bias));
      EXPECT_TRUE(at::allclose(full_grad(net->a->weight), original->a->weight.grad(), 1e-5, 1e-6));
      EXPECT_TRUE(at::allclose(full_grad(net->b->bias), original->b->bias.grad(), 1e-5, 1e-6));
      EXPECT_EQ(shard_info(net->b->bias)->name, "b.bias");
      if (listing == Listing::Flat) {
        EXPECT_THAT(message_of<UsageError>([&] { (void)to_local(net->a->weight); }), HasSubstr("one vector"));
      } else {
        EXPECT_TRUE(at::equal(to_local(net->a->weight), to_local(parameters(*net)[0])));
      }
      EXPECT_THAT(message_of<UsageError>([&] { (void)to_local(net->a->weight.t()); }), HasSubstr("whole parameter"));
      EXPECT_THAT(message_of<UsageError>([&] { (void)full_parameter(net->a->weight.t()); }), HasSubstr("not a sharded parameter"));
    });
  }
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
    EXPECT_TRUE(at::equal(full_tensor(*net, "b.bias"), original->b->bias));

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

TEST(ShardInfos, KnowWhatTheyAreAPartOf) {
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

/// Whole gradients that are changed in every way, compared with those of a model that is not sharded.
TEST(WholeGradients, AreWrittenBack) {
  with_ranks(4, [](const Communicator& world) {
    for (const auto& options : {ShardOptions{.mesh = world}, ShardOptions{.mesh = Mesh(world, {.replicate = 2, .shard = 2})},
                                ShardOptions{.mesh = world, .residence = Residence::Gathered, .layout = Layout::Rows},
                                ShardOptions{.mesh = world, .listing = Listing::Flat}}) {
      auto net = seeded_net(), plain = seeded_net();
      for (const auto& child : net->children()) fully_shard(child, options);
      fully_shard(net, options);
      net(input()).pow(2).sum().backward();
      plain(input()).pow(2).sum().backward();
      const auto change = [&](Net& changed) {
        const torch::NoGradGuard no_grad;
        changed->a->weight.grad().sub_(changed->c->bias.grad().sum());
        changed->b->weight.mutable_grad() = at::ones({10, 10});
        if (options.listing == Listing::ByName) changed->c->weight.mutable_grad() = at::Tensor();
      };
      (void)grad_norm(parameters(*net));  // this norm must not be reused after the gradients change
      {
        const auto guard = full_params(*net, Access::Write, WithGradients::Yes);
        change(net);
      }
      change(plain);
      for (const auto& [sharded, whole] : {std::pair(net->a->weight, plain->a->weight), std::pair(net->b->weight, plain->b->weight),
                                           std::pair(net->c->weight, plain->c->weight), std::pair(net->c->bias, plain->c->bias)}) {
        const auto all = full_grad(sharded);
        ASSERT_EQ(all.defined(), whole.grad().defined());
        EXPECT_TRUE(!all.defined() || at::allclose(all, whole.grad(), 1e-5, 1e-6));
      }
      EXPECT_NEAR(grad_norm(parameters(*net)).item<double>(), nn::utils::clip_grad_norm_(plain->parameters(), 1e9), 1e-3);
    }
  });
}

/// If gradients can't be written back, the next step must not run without them.
TEST(WholeGradients, ThatAreLostStopTheNextStep) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    const std::pair<std::string, std::function<void()>> changes[] = {
        {"another shape than the parameter", [&] { net->b->weight.mutable_grad() = at::ones({10, 9}); }},
        {"gradients of different parameters; ",
         [&] {
           if (world.rank() == 0) net->b->weight.mutable_grad() = at::Tensor();
         }},
        {"another shape than the parameter", [&] {
           if (world.rank() == 1) net->b->weight.mutable_grad() = at::ones({9});
         }}};
    for (const auto& [why, change] : changes) {
      for (const bool has_gradients : {true, false}) {
        if (!has_gradients && why.starts_with("gradients")) continue;
        const auto before = full_parameter(net->b->weight);
        if (has_gradients) net(input()).pow(2).sum().backward();
        {
          const auto guard = full_params(*net, Access::Write, WithGradients::Yes);
          const torch::NoGradGuard no_grad;
          change();
        }
        EXPECT_THAT(message_of<UsageError>([&] { (void)grad_norm(parameters(*net)); }),
                    AllOf(HasSubstr("is lost, because"), HasSubstr(why)));
        EXPECT_THAT(message_of<UsageError>([&] { optimizer.step(); }), HasSubstr("is lost, because"));
        torch::optim::SGD other(parameters(*net), torch::optim::SGDOptions(0.1));
        EXPECT_THAT(message_of<UsageError>([&] { other.step(); }), HasSubstr("is lost, because"));
        EXPECT_TRUE(at::equal(full_parameter(net->b->weight), before));
        has_gradients ? optimizer.zero_grad() : other.zero_grad();
        net(input()).pow(2).sum().backward();
        optimizer.step();
        EXPECT_TRUE(full_parameter(net->b->weight).isfinite().all().item<bool>());
        optimizer.zero_grad();
      }
    }
  });
}

TEST(WholeGradients, LeaveTheShardsAloneWhereTheyOnlyRead) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    net(input()).pow(2).sum().backward();
    const auto before = full_grad(net->b->weight);
    {
      const auto guard = full_params(*net, Access::Read, WithGradients::Yes);
      EXPECT_TRUE(at::equal(net->b->weight.grad(), before));
      net->b->weight.grad().zero_();
    }
    EXPECT_TRUE(at::equal(full_grad(net->b->weight), before));
    EXPECT_THAT(message_of<UsageError>([&] { net->b->weight.grad(); }), HasSubstr("full_params with WithGradients::Yes"));
    {
      const auto guard = full_params(*net, Access::Write, WithGradients::Yes);
      net->zero_grad();  // clears the gradients of the shards, which takes precedence
    }
    EXPECT_FALSE(full_grad(net->b->weight).defined());
  });
}

TEST(WholeGradients, AreRefusedOnAllRanksIfOneHasUnsyncedOnes) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    {
      const auto local = no_sync(*net);
      net(input()).pow(2).sum().backward();
    }
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    if (world.rank() == 1) optimizer.zero_grad();
    EXPECT_THAT(message_of<UsageError>([&] { (void)full_params(*net, Access::Read, WithGradients::Yes); }), HasSubstr("sync_gradients"));
    optimizer.zero_grad();
  });
}

TEST(UnsyncedGradients, CanBeReadUntilTheyAreReduced) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world), plain = seeded_net();
    EXPECT_FALSE(unsynced_grad(net->a->weight).defined());
    for (int pass = 0; pass < 2; pass++) {
      const auto local = no_sync(*net);
      net(input(pass + world.rank())).pow(2).sum().backward();
      plain(input(pass + world.rank())).pow(2).sum().backward();
      EXPECT_TRUE(at::equal(unsynced_grad(net->a->weight), plain->a->weight.grad()));
    }
    unsynced_grad(net->a->weight).zero_();  // changes a copy only
    EXPECT_TRUE(at::equal(unsynced_grad(parameters(*net)[0]), plain->a->weight.grad()));
    sync_gradients(*net);
    EXPECT_FALSE(unsynced_grad(net->a->weight).defined());
    auto replicas = seeded_net();
    fully_shard(replicas, {.mesh = Mesh(world, {.replicate = 2, .shard = 1})});
    set_requires_all_reduce(*replicas, Required::No);
    replicas(input()).pow(2).sum().backward();
    EXPECT_THAT(message_of<UsageError>([&] { unsynced_grad(replicas->a->weight); }), HasSubstr("a sum over its shard group"));
  });
}

}  // namespace
}  // namespace tessera::testing::full_params_test
