// Uses of sharded parameters that would give wrong results are refused, with an error that names the parameter and the way out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/rebind.h"
#include "tests/testing/net.h"

namespace tessera::testing::refusal_test {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

// --- Refused uses and their errors ---

TEST(Refused, AreWritesToWholeParameters) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    const torch::NoGradGuard no_grad;
    const auto said = message_of<UsageError>([&] { net->a->weight.mul_(2); });
    EXPECT_THAT(said, ::testing::AllOf(HasSubstr("aten::mul_"), HasSubstr("'weight' of unit 'Linear'"), HasSubstr("full_params")));
    EXPECT_THAT(message_of<UsageError>([&] { torch::nn::init::normal_(net->b->weight); }), HasSubstr("would write"));
    EXPECT_THAT(message_of<UsageError>([&] { net->b->reset_parameters(); }), HasSubstr("would write"));
  });
}

TEST(Refused, IsMemoryThatIsNotThere) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    EXPECT_THAT(message_of<c10::Error>([&] { (void)net->a->weight.data_ptr<float>(); }), HasSubstr("are sharded"));
  });
}

TEST(Refused, AreNormsAndSumsOverShards) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    net(input()).sum().backward();
    EXPECT_THAT(message_of<UsageError>([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0); }),
                HasSubstr("tessera::clip_grad_norm"));
    EXPECT_THAT(message_of<UsageError>([&] { (void)net->parameters()[0].sum(); }), HasSubstr("this rank alone"));
    EXPECT_THAT(message_of<UsageError>([&] {
                  torch::optim::LBFGS optimizer(net->parameters());
                  optimizer.step([&] {
                    const auto loss = net(input()).sum();
                    loss.backward();
                    return loss;
                  });
                }),
                HasSubstr("LBFGS"));
  });
}

TEST(Refused, IsOtherMemoryUnderAParameter) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    EXPECT_THAT(message_of<UsageError>([&] { net->to(at::kDouble); }), HasSubstr("before fully_shard"));
    net->to(at::kFloat);  // nothing to do, so nothing is wrong
    net(input()).sum().backward();
    EXPECT_THAT(message_of<UsageError>([&] { net->a->weight.set_(at::ones({10, 6})); }), HasSubstr("aten::set_"));
  });
}

TEST(Refused, IsToSaveOneRanksPartOfAModel) {
  with_ranks(3, [](const Communicator& world) {
    auto net = sharded_net(world);
    std::stringstream file;
    EXPECT_THAT(message_of<UsageError>([&] { torch::save(net, file); }),
                ::testing::AllOf(HasSubstr("this rank's part of 'weight' of unit"), HasSubstr("tessera::checkpoint::save(folder, {.model")));
    net(input()).sum().backward();  // the model is unchanged

    std::stringstream whole;
    torch::save(seeded_net(), whole);
    EXPECT_THAT(message_of<UsageError>([&] { torch::load(net, whole); }),
                ::testing::AllOf(HasSubstr("shard of 'weight'"), HasSubstr("[10, 6]"), HasSubstr("before fully_shard")));
  });
  with_ranks(1, [](const Communicator& world) {
    auto net = sharded_net(world);
    std::stringstream file;
    EXPECT_THAT(message_of<UsageError>([&] { torch::save(net, file); }), HasSubstr("this rank's part of"));  // all values, but flat
    const auto whole = full_tensor(*net, "a.weight");
    std::stringstream other;
    torch::save(whole, other);
    at::Tensor read;
    torch::load(read, other);
    EXPECT_TRUE(at::equal(read, whole));
  });
}

TEST(Refused, AreWritesToShardsOfAUnitThatIsInUse) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    net(input()).sum().backward();
    {
      const auto guard = full_params(*net);
      EXPECT_THAT(message_of<UsageError>([&] { optimizer.step(); }), HasSubstr("inside tessera::full_params"));
    }
    optimizer.step();
    EXPECT_TRUE(at::equal(full_parameter(net->parameters()[0]), full_tensor(*net, "a.weight")));
  });
}

TEST(Refused, AreWritesToShardsThatReadTheModelItself) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    const torch::NoGradGuard no_grad;
    auto shard = parameters(*net)[1];
    EXPECT_THAT(message_of<UsageError>([&] { shard.mul_(net->c->bias[0]); }),
                ::testing::AllOf(HasSubstr("mul_ writes shards of unit 'a'"), HasSubstr("of unit 'c'; clone() these before")));
    const auto expected = full_parameter(shard) * full_parameter(net->c->bias)[0];
    shard.mul_(net->c->bias[0].clone());
    EXPECT_TRUE(at::equal(full_parameter(shard), expected));
    EXPECT_TRUE(at::equal(net->a->bias.clone(), expected));
  });
}

TEST(Refused, AreRanksThatUseDifferentParametersOfAUnit) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world});
    EXPECT_THAT(message_of<CommError>([&] { (world.rank() == 0 ? net->a(input()) : net(input())).sum().backward(); }),
                HasSubstr("'Net without b.weight, b.bias, c.weight, c.bias'"));
  });
}

TEST(Refused, AreRanksThatFreezeDifferentParameters) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world});
    if (world.rank() == 1) net->b->bias.set_requires_grad(false);
    EXPECT_THAT(message_of<CommError>([&] { net(input()).sum().backward(); }), HasSubstr("freeze the same ones on every rank"));
  });
}

TEST(Refused, AreUnitsInDifferentOrders) {
  with_ranks(2, [](const Communicator& world) {
    nn::Linear first(4, 4), second(4, 4);  // of one size and one name, and parts of no larger model
    fully_shard(first, {.mesh = world, .start = Start::FromRank0});
    fully_shard(second, {.mesh = world, .start = Start::FromRank0});
    EXPECT_THAT(message_of<CommError>([&] { (world.rank() == 0 ? first : second)(at::ones({1, 4})); }), HasSubstr("(unit "));
  });
}

TEST(Refused, IsAClone) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    EXPECT_THAT(message_of<UsageError>([&] { (void)net->a->clone(); }), HasSubstr("only this rank's part of 'weight'"));
    EXPECT_EQ(net->a->parameters()[0].detach().clone().sizes(), net->a->parameters()[0].sizes());
  });
}

TEST(Refused, AreScripts) {
  EXPECT_THAT(message_of<UsageError>([] { fully_shard(torch::jit::Module("Script"), {.mesh = self_world()}); }), HasSubstr("TorchScript"));
}

TEST(Refused, IsShardingTwice) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net->a, {.mesh = world}); }), HasSubstr("sharded already"));
    auto outer_first = seeded_net();
    fully_shard(outer_first, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(outer_first->b, {.mesh = world}); }), HasSubstr("as a part of unit 'Net'"));
  });
}

TEST(Refused, AreTiedParametersInTwoUnits) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    net->register_parameter("tied", net->a->weight);
    fully_shard(net->a, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net, {.mesh = world}); }), HasSubstr("'tied' is tied to one of unit 'Linear'"));
  });
}

TEST(Refused, AreParametersThatOverlapThemselves) {
  with_ranks(1, [](const Communicator& world) {
    nn::Linear layer(4, 4);
    layer->register_parameter("expanded", at::ones({1, 4}).expand({3, 4}));
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(layer, {.mesh = world}); }), HasSubstr("'expanded' overlaps itself"));
  });
}

TEST(Refused, IsAGraphWhoseParametersWereWrittenMeanwhile) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    net(input()).sum().backward();
    const auto loss = net(input()).pow(2).sum();
    optimizer.step();
    EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
  });
}

TEST(Refused, AreRanksThatStartFromDifferentWeights) {
  with_ranks(3, [](const Communicator& world) {
    const auto layer_of = [&] {
      nn::Linear layer(4, 4);
      const torch::NoGradGuard no_grad;
      layer->weight.fill_(1 + world.rank() / 2);  // the last rank differs
      layer->bias.zero_();
      return layer;
    };
    auto layer = layer_of();
    fully_shard(layer, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { layer(at::ones({1, 4})); }), HasSubstr("brought different parameters for unit 'Linear'"));
    auto sent = layer_of();
    fully_shard(sent, {.mesh = world, .start = Start::FromRank0});
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(sent(at::ones({1, 4}))[0][0].item<float>(), 4);
  });
}

TEST(Refused, AreTrainableParametersInNoUnit) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net->a, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { (void)parameters(*net); }), HasSubstr("'b.weight' is trainable, but in no unit"));
    EXPECT_THAT(message_of<UsageError>([&] { (void)grad_norm(net->parameters()); }),
                HasSubstr("of shape [10, 10], given together with shards, is trainable, but in no unit"));
    (void)grad_norm(net->b->parameters());  // no shard among them
    for (const auto& child : {net->b, net->c}) fully_shard(child, {.mesh = world, .ignored = {child->weight}});
    EXPECT_EQ(parameters(*net).size(), 6);
    EXPECT_FALSE(shard_info(net->b->weight));
    EXPECT_TRUE(shard_info(net->b->parameters()[1]));
    // Whole parameters count once.
    net(input()).pow(2).sum().backward();
    auto whole = seeded_net();
    whole(input()).pow(2).sum().backward();
    EXPECT_NEAR(grad_norm(parameters(*net)).item<double>(), nn::utils::clip_grad_norm_(whole->parameters(), 1e9), 1e-4);
  });
}

// --- Optimizers that were made before fully_shard ---

TEST(OldOptimizers, AreFoundOrMoved) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    torch::optim::SGD forgotten(net->parameters(), 0.1), moved(net->parameters(), 0.1);
    for (const auto& child : net->children()) fully_shard(child, {.mesh = world});
    rebind(moved, *net);
    auto whole = seeded_net();
    torch::optim::SGD reference(whole->parameters(), 0.1);
    for (int step = 0; step < 3; step++) {
      net(input()).pow(2).sum().backward();
      whole(input()).pow(2).sum().backward();
      EXPECT_THAT(message_of<UsageError>([&] { forgotten.step(); }), HasSubstr("tessera::rebind"));
      moved.step();
      reference.step();
      net->zero_grad();
      reference.zero_grad();
    }
    EXPECT_TRUE(at::allclose(full_parameter(parameters(*net)[0]), whole->a->weight, 1e-5, 1e-6));
    EXPECT_THAT(message_of<UsageError>([&] { rebind(reference, *net); }), HasSubstr("holds no parameter"));
  });
}

TEST(OldOptimizers, AreMovedAsAWholeOrNotAtAll) {
  with_ranks(1, [](const Communicator& world) {
    auto net = seeded_net();
    const auto first = net->a->parameters(), second = net->b->parameters();
    torch::optim::SGD optimizer(std::vector<torch::optim::OptimizerParamGroup>{first, second}, torch::optim::SGDOptions(0.1).momentum(0.9));
    net->b->weight.mutable_grad() = at::ones({10, 10});
    optimizer.step();
    optimizer.zero_grad();
    fully_shard(net, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { rebind(optimizer, *net); }), HasSubstr("taken steps already"));
    EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(first[0]));
  });
}

}  // namespace
}  // namespace tessera::testing::refusal_test
