// Every way to change a parameter or to replace its memory. Unsharded parameters refuse the change with an error. Shards accept it, and the
// next pass uses it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"

namespace tessera::testing::write_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Write {
  std::string name;
  void (*to)(at::Tensor tensor);
  friend std::ostream& operator<<(std::ostream& out, const Write& self) { return out << self.name; }
};

class Writes : public ::testing::TestWithParam<Write> {};

// All of these writes double the values, and work for any shape.
INSTANTIATE_TEST_SUITE_P(Ways, Writes,
                         ::testing::Values(Write{"in_place", [](at::Tensor t) { t.mul_(2); }},
                                           Write{"detached", [](at::Tensor t) { t.detach().mul_(2); }},
                                           Write{"data", [](at::Tensor t) { t.data().mul_(2); }},
                                           Write{"variable_data", [](at::Tensor t) { t.variable_data().mul_(2); }},
                                           Write{"view", [](at::Tensor t) { t.view({-1}).mul_(2); }},
                                           Write{"by_rank",
                                                 [](at::Tensor t) {  // runs more operators on a rank that has more rows
                                                   for (auto i = t.size(0); i > 0; i--) t.mul_(1);
                                                   t.mul_(2);
                                                 }},
                                           Write{"copy", [](at::Tensor t) { t.copy_(t.detach().clone() * 2); }},
                                           Write{"out", [](at::Tensor t) { at::mul_out(t, t.detach().clone(), at::full({}, 2.f)); }},
                                           Write{"where", [](at::Tensor t) { t.copy_(at::where(t > 0, t + t.abs(), 2 * t)); }},
                                           Write{"foreach", [](at::Tensor t) { at::_foreach_mul_({t}, 2); }},
                                           Write{"foreach_copy", [](at::Tensor t) { at::_foreach_copy_({t}, {t.detach().clone() * 2}); }}),
                         ::testing::PrintToStringParamName());

TEST_P(Writes, ToWholeParametersAreRefused) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto expected = net(input()).detach();
    {
      const torch::NoGradGuard no_grad;
      EXPECT_THAT(message_of<UsageError>([&] { GetParam().to(net->b->weight); }),
                  AllOf(HasSubstr("would write"), HasSubstr("of unit 'Linear'"), HasSubstr("full_params")));
    }
    EXPECT_TRUE(at::equal(net(input()), expected));
  });
}

TEST_P(Writes, ToShardsAreSeenByTheNextPassAndByGraphsThatItOutdates) {
  for (const int ranks : {1, 3}) {
    with_ranks(ranks, [](const Communicator& world) {
      auto net = sharded_net(world);
      auto whole = seeded_net();
      const auto stale = net(input()).sum();
      {
        const torch::NoGradGuard no_grad;
        for (const auto& shard : parameters(*net)) GetParam().to(shard);
        for (auto& parameter : whole->parameters()) parameter.mul_(2);
      }
      EXPECT_THAT(message_of<c10::Error>([&] { stale.backward(); }), HasSubstr("modified by an inplace operation"));
      EXPECT_TRUE(at::equal(net(input()), whole(input())));
    });
  }
}

TEST(Writes, WithGradientsLeaveTheGraphOfAWholeParameterAlone) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto before = net->a->weight.grad_fn()->name();
    EXPECT_THAT(message_of<UsageError>([&] { net->a->weight.mul_(at::ones({10, 6})); }), HasSubstr("would write"));
    EXPECT_EQ(net->a->weight.grad_fn()->name(), before);
  });
}

TEST(Writes, OfAForwardPassAreRefused) {
  with_ranks(2, [](const Communicator& world) {
    nn::Embedding words(nn::EmbeddingOptions(6, 4).max_norm(0.5));
    fill_with_numbers(*words);
    fully_shard(words, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { words(here(torch::tensor({1, 2}))); }),
                AllOf(HasSubstr("aten::embedding_renorm_"), HasSubstr("'weight' of unit 'Embedding'")));
  });
}

TEST(Rebinding, IsRefusedInEveryForm) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto& weight = net->a->weight;
    const auto shard = parameters(*net)[0];
    EXPECT_THAT(message_of<UsageError>([&] { nn::utils::vector_to_parameters(at::zeros({shard.numel()}), {shard}); }),
                HasSubstr("vector_to_parameters"));
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(message_of<UsageError>([&] { weight.resize_({3, 3}); }), HasSubstr("aten::resize_"));
    EXPECT_THAT(message_of<UsageError>([&] { at::empty({0}).set_(weight); }), HasSubstr("aten::set_"));
    for (const auto& tensor : {weight, shard}) {
      EXPECT_THAT(message_of<UsageError>([&] { tensor.set_data(at::zeros({10, 6})); }), HasSubstr("cut it off"));
    }
    // No operator does this, so paging finds it at the next use.
    weight.unsafeGetTensorImpl()->set_storage_keep_dtype(at::zeros({10, 6}).storage());
    EXPECT_THAT(message_of<UsageError>([&] { net(input()); }), HasSubstr("belongs to no unit"));
  });
}

TEST(Rebinding, OfARecurrentModuleToItsShardsIsRefused) {
  with_ranks(2, [](const Communicator& world) {
    nn::LSTM lstm(8, 6);
    fill_with_numbers(*lstm);
    fully_shard(lstm, {.mesh = world});
    const auto x = numbers({7, 3, 8});
    lstm(x);
    lstm->to(at::kFloat);  // changes nothing, but takes the weights from parameters()
    EXPECT_THAT(message_of<UsageError>([&] { lstm(x); }), AllOf(HasSubstr("aten::lstm was given shards"), HasSubstr("to()")));
  });
}

TEST(Memory, ThatIsReachedPastOperatorsIsGuardedByName) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    const auto& weight = net->a->weight;
    // A tensor of the program's own over the same storage lacks the paging key.
    EXPECT_THAT(message_of<c10::Error>([&] {
                  const auto alias = at::empty({0}).set_(weight.storage(), weight.storage_offset(), weight.sizes(), weight.strides());
                  (void)(alias * 2);
                }),
                HasSubstr("are sharded"));
    net(input());  // which frees the first unit before it ends
    EXPECT_THAT(message_of<c10::Error>([&] { (void)weight.accessor<float, 2>()[0][0]; }),
                AllOf(HasSubstr("parameters of unit 'a' are sharded"), HasSubstr("full_params")));
    EXPECT_THAT(message_of<c10::Error>([&] { (void)weight.mutable_data_ptr(); }), HasSubstr("are sharded"));
  });
}

TEST(Reductions, AreRefusedOnEveryRankAlsoWhereAShardIsEmpty) {
  with_ranks(7, [](const Communicator& world) {
    auto net = sharded_net(world);
    net(input()).sum().backward();
    for (const auto& shard : parameters(*net)) {
      for (const auto& tensor : {shard, shard.grad(), shard.detach().view({-1})}) {
        EXPECT_THAT(message_of<UsageError>([&] { (void)tensor.max(); }), HasSubstr("this rank alone"));
        EXPECT_THAT(message_of<UsageError>([&] { (void)tensor.norm(); }), HasSubstr("this rank alone"));
        EXPECT_THAT(message_of<UsageError>([&] { (void)at::_foreach_norm({tensor}); }), HasSubstr("this rank alone"));
        EXPECT_THAT(message_of<UsageError>([&] { (void)at::cat({tensor, tensor}); }), HasSubstr("this rank alone"));
      }
    }
  });
}

TEST(Shards, TellMatricesFromVectorsAsTheirParametersDo) {
  with_ranks(7, [](const Communicator& world) {
    auto net = sharded_net(world);
    std::vector<at::Tensor> matrices, others;
    for (const auto& shard : net->parameters()) (shard.dim() >= 2 ? matrices : others).push_back(shard);
    EXPECT_EQ(matrices.size(), 3);
    EXPECT_EQ(others.size(), 3);
  });
}

TEST(Freezing, OfShardsByHandActsAtTheNextBackward) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    for (auto& shard : net->b->parameters()) shard.set_requires_grad(false);
    net(input()).sum().backward();
    for (const auto& shard : net->b->parameters()) EXPECT_FALSE(shard.grad().defined());
    for (const auto& shard : net->c->parameters()) EXPECT_TRUE(shard.grad().defined());
    EXPECT_ANY_THROW(net->a->weight.requires_grad_(false));  // torch's own: not a leaf
  });
}

TEST(Ranks, ThatUseUnitsInDifferentOrderAreToldSo) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    const torch::NoGradGuard no_grad;
    const auto x = at::ones({1, 10});
    const auto said = message_of<CommError>([&] { world.rank() == 0 ? net->b(x) : net->c(x); });
    EXPECT_THAT(said, AllOf(HasSubstr("b"), HasSubstr("c")));
    EXPECT_TRUE(at::equal(net(input()), seeded_net()->forward(input()))) << "after an error that left nobody waiting";
  });
}

}  // namespace
}  // namespace tessera::testing::write_test
