// config.json of a BERT is read with all its keys; a model that Tessera's BERT can't be is refused, with the name of the key.
#include "tessera/models/bert_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::testing::bert_config_test {
namespace {

using models::BertConfig;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(BertConfig, SurvivesItsFile) {
  const Folder folder;
  for (const auto& config : {BertConfig{}, BertConfig{.vocab_size = 9,
                                                      .hidden_size = 6,
                                                      .num_hidden_layers = 1,
                                                      .num_attention_heads = 3,
                                                      .intermediate_size = 7,
                                                      .max_position_embeddings = 8,
                                                      .type_vocab_size = 4,
                                                      .hidden_act = models::BertActivation::Silu,
                                                      .hidden_dropout_prob = 0,
                                                      .attention_probs_dropout_prob = 0.25,
                                                      .classifier_dropout = 0.5,
                                                      .layer_norm_eps = 1e-6,
                                                      .initializer_range = 0.5,
                                                      .pad_token_id = std::nullopt,
                                                      .num_labels = 12}}) {
    config.write(folder.path());
    EXPECT_EQ(BertConfig::read(folder.path()), config);
  }
  write_file(folder / "config.json", R"({"hidden_size": 24, "unknown": [1]})");
  EXPECT_EQ(BertConfig::read(folder.path()), BertConfig{.hidden_size = 24});
}

TEST(BertConfig, RefusesWhatItDoesNotKnow) {
  const Folder folder;
  EXPECT_THAT(message_of<IoError>([&] { BertConfig::read(folder.path()); }), HasSubstr("config.json"));
  write_file(folder / "config.json", "{\"hidden_size\": ");
  EXPECT_THAT(message_of<IoError>([&] { BertConfig::read(folder.path()); }), HasSubstr("it is not a JSON object"));
  const auto refusal = [&](const std::string& text) {
    write_file(folder / "config.json", text);
    return message_of<ConfigError>([&] { BertConfig::read(folder.path()); });
  };
  EXPECT_THAT(refusal(R"({"model_type": "gpt2"})"), AllOf(HasSubstr("config.json: model_type: \"gpt2\""), HasSubstr("\"bert\"")));
  EXPECT_THAT(refusal(R"({"position_embedding_type": "relative_key"})"), HasSubstr("position_embedding_type"));
  EXPECT_THAT(refusal(R"({"is_decoder": true})"), HasSubstr("is_decoder"));
  EXPECT_THAT(refusal(R"({"hidden_act": "mish"})"), AllOf(HasSubstr("hidden_act: \"mish\""), HasSubstr("gelu_new")));
  EXPECT_THAT(refusal(R"({"hidden_size": "wide"})"), HasSubstr("hidden_size: \"wide\": this must be an integer"));
  EXPECT_THAT(refusal(R"({"hidden_size": 10.5})"), HasSubstr("this must be an integer"));
  EXPECT_THAT(refusal(R"({"hidden_size": 10})"), AllOf(HasSubstr("config.json: a BERT can't have hidden_size 10"), HasSubstr("num_attention_heads")));
  EXPECT_THAT(refusal(R"({"num_hidden_layers": 0})"), HasSubstr("num_hidden_layers 0"));
  EXPECT_THAT(refusal(R"({"hidden_dropout_prob": 1})"), HasSubstr("hidden_dropout_prob 1"));
  EXPECT_THAT(refusal(R"({"pad_token_id": 30522})"), HasSubstr("pad_token_id 30522"));
}

}  // namespace
}  // namespace tessera::testing::bert_config_test
