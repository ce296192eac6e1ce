// A sharded BERT trains like one that is not sharded, and padding changes nothing.
#include "tessera/models/bert.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "tessera/base/error.h"
#include "tessera/shard/call.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/net.h"
#include "tests/testing/transports.h"

namespace tessera::testing::bert_test {
namespace {

using ::testing::HasSubstr;

const models::BertConfig kSmall{.vocab_size = 30,
                                .hidden_size = 16,
                                .num_hidden_layers = 2,
                                .num_attention_heads = 2,
                                .intermediate_size = 32,
                                .max_position_embeddings = 10,
                                .hidden_dropout_prob = 0,
                                .attention_probs_dropout_prob = 0};

models::BertForSequenceClassification small_bert() {
  torch::manual_seed(5);
  return models::BertForSequenceClassification(kSmall);
}

at::Tensor loss_of(models::BertForSequenceClassification& model) {
  const auto tokens = at::arange(1, 17).view({2, 8});
  const auto mask = at::tensor({1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0}, at::kLong).view({2, 8});
  return at::cross_entropy_loss(model(tokens, mask, tokens.gt(5).to(at::kLong)), at::tensor({0, 1}, at::kLong));
}

TEST(Bert, TrainsShardedAsItDoesWhole) {
  auto whole = small_bert();
  const auto expected = loss_of(whole);
  expected.backward();
  std::array models = {small_bert(), small_bert()};  // here, because the ranks share one random generator
  with_ranks(2, [&](const Communicator& world) {
    auto& model = models.at(static_cast<size_t>(world.rank()));
    fully_shard(model, {.mesh = world}, wrap_classes({"BertLayer", "BertEmbeddings", "BertSelfOutput"}));
    const auto loss = loss_of(model);
    EXPECT_TRUE(at::allclose(loss, expected));
    loss.backward();
    for (const auto& [name, parameter] : named_parameters(*model)) {
      const auto theirs = whole->named_parameters()[name].grad();
      EXPECT_TRUE(at::allclose(full_grad(parameter), theirs, 1e-4, 1e-6)) << name;
    }
  });
}

TEST(Bert, LayersCanBeComputedAgain) {
  auto kept = small_bert(), again = small_bert();
  activation::checkpoint_modules(*again, wrap_classes({"BertLayer"}));
  loss_of(kept).backward();
  loss_of(again).backward();
  for (const auto& each : kept->named_parameters())
    EXPECT_TRUE(at::equal(again->named_parameters()[each.key()].grad(), each->grad())) << each.key();
}

TEST(Bert, PaddingChangesNothing) {
  auto model = small_bert();
  model->eval();
  const auto tokens = at::arange(1, 6).view({1, 5});
  const auto padded = at::constant_pad_nd(tokens, {0, 4}, 0);
  EXPECT_TRUE(at::allclose(model(tokens), model(padded, padded.ne(0).to(at::kLong)), 1e-4, 1e-6));
  EXPECT_FALSE(at::allclose(model(tokens), model(padded), 1e-4, 1e-6));
}

TEST(Bert, DropsOutInTrainingOnly) {
  torch::manual_seed(5);
  auto config = kSmall;
  config.attention_probs_dropout_prob = 0.5;
  models::BertModel model(config);
  const auto tokens = at::arange(1, 6).view({1, 5});
  EXPECT_FALSE(at::equal(model(tokens).first, model(tokens).first));
  model->eval();
  EXPECT_TRUE(at::equal(model(tokens).first, model(tokens).first));
}

TEST(Bert, RefusesWhatDoesNotFit) {
  auto model = small_bert();
  EXPECT_THAT(message_of<UsageError>([&] { model(at::ones({2, 11}, at::kLong)); }), HasSubstr("a length up to 10, not [2, 11]"));
  auto config = kSmall;
  config.num_attention_heads = 3;
  EXPECT_THAT(message_of<ConfigError>([&] { models::BertModel bert(config); }), HasSubstr("hidden_size 16"));
}

}  // namespace
}  // namespace tessera::testing::bert_test
