// The results of a decoder do not depend on how it gets texts: one by one or packed into a row, at once or token by token, sharded or not.
#include "tessera/models/llama.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/models/generate.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"

namespace tessera::testing::llama_test {
namespace {

using models::LlamaConfig;
using models::LlamaForCausalLM;
using ::testing::HasSubstr;

LlamaConfig small(bool sliding = false) {
  LlamaConfig config{.vocab_size = 40,
                     .hidden_size = 24,
                     .intermediate_size = 36,
                     .num_hidden_layers = 2,
                     .num_attention_heads = 4,
                     .num_key_value_heads = 2,
                     .max_position_embeddings = 32,
                     .initializer_range = 0.2};
  if (!sliding) return config;
  config.model_type = "mistral";
  config.sliding_window = 4;
  config.layer_types = {"full_attention", "sliding_attention"};
  return config;
}

LlamaForCausalLM seeded(const LlamaConfig& config) {
  static std::mutex generator;
  std::lock_guard lock(generator);
  torch::manual_seed(6);
  return LlamaForCausalLM(config);
}

at::Tensor text(int64_t length, int64_t seed = 1) {
  return (at::arange(length) * (3 + seed) + seed) % 40;
}

TEST(Llama, SeesNothingOfOtherDocumentsInARow) {
  for (const bool sliding : {false, true}) {
    auto model = seeded(small(sliding));
    const auto first = text(5, 1), second = text(9, 2), third = text(2, 3);
    const auto row = at::cat({first, second, third}).unsqueeze(0),
               positions = at::cat({at::arange(5), at::arange(9), at::arange(2)}).unsqueeze(0);
    const auto packed = model(row, models::LlamaInput{.positions = positions});
    const auto apart = at::cat({model(first.unsqueeze(0)), model(second.unsqueeze(0)), model(third.unsqueeze(0))}, 1);
    EXPECT_TRUE(at::allclose(packed, apart, 1e-4, 1e-5)) << sliding;
    // In a batch, each row has its own documents.
    const auto two = model(at::cat({row, row}), models::LlamaInput{.positions = at::cat({positions, at::arange(16).unsqueeze(0)})});
    EXPECT_TRUE(at::allclose(two.narrow(0, 0, 1), packed, 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(two.narrow(0, 1, 1), model(row), 1e-4, 1e-5));
  }
}

TEST(Llama, GoesOnFromItsCache) {
  for (const bool sliding : {false, true}) {
    auto model = seeded(small(sliding));
    const torch::NoGradGuard no_grad;
    const auto tokens = at::stack({text(14, 1), text(14, 2)});
    models::LlamaCache cache(20);
    std::vector<at::Tensor> scores;
    for (const auto& [begin, length] : {std::pair<int64_t, int64_t>{0, 6}, {6, 1}, {7, 4}, {11, 1}, {12, 2}})
      scores.push_back(model(tokens.narrow(1, begin, length), models::LlamaInput{.cache = &cache}));
    EXPECT_EQ(cache.length(), 14);
    EXPECT_TRUE(at::allclose(at::cat(scores, 1), model(tokens), 1e-4, 1e-5)) << sliding;
    EXPECT_THAT(message_of<UsageError>([&] { model(text(7).unsqueeze(0), models::LlamaInput{.cache = &cache}); }),
                HasSubstr("a text of 21 tokens does not fit a LlamaCache for 20"));
  }
}

TEST(Llama, RefusesTextsThatAreTooLong) {
  auto model = seeded(small());
  EXPECT_THAT(message_of<UsageError>([&] { model(text(33).unsqueeze(0)); }),
              HasSubstr("a text of 33 tokens is longer than this model's max_position_embeddings, 32"));
}

TEST(Llama, TrainsShardedAsItDoesWhole) {
  for (const bool tied : {false, true}) {
    auto config = small();
    config.tie_word_embeddings = tied;
    with_ranks(2, [&](const Communicator& world) {
      auto whole = seeded(config), model = seeded(config);
      activation::checkpoint_modules(*model, wrap_classes({"LlamaDecoderLayer"}));
      fully_shard(model, {.mesh = world}, wrap_classes({"LlamaDecoderLayer"}));
      const auto loss_of = [&](LlamaForCausalLM& each, int rank) {
        const auto tokens = text(12, rank).unsqueeze(0), targets = text(12, rank + 1).unsqueeze(0);
        return each->loss(tokens, targets, {.rows_at_once = 5}, {.positions = at::cat({at::arange(4), at::arange(8)}).unsqueeze(0)});
      };
      mean_over_ranks(world, [&](int rank) { return loss_of(whole, rank); }).backward();
      loss_of(model, world.rank()).backward();
      const auto expected = whole->named_parameters();
      for (const auto& [name, parameter] : named_parameters(model))
        EXPECT_TRUE(at::allclose(full_grad(parameter), expected[name].grad(), 1e-4, 1e-6)) << name;
    });
  }
}

TEST(Generate, TakesTheLikeliestOrDrawsFromTheLikely) {
  auto model = seeded(small());
  const auto prompt = at::stack({text(4, 1), text(4, 2)});
  const auto greedy = models::generate(*model, prompt, {.most = 6});
  ASSERT_EQ(greedy.sizes(), (std::vector<int64_t>{2, 10}));
  EXPECT_TRUE(at::equal(greedy.narrow(1, 5, 5), model(greedy).argmax(-1).narrow(1, 4, 5)));
  EXPECT_TRUE(at::equal(models::generate(*model, prompt, {.most = 6, .temperature = 1, .top_p = 1e-9}), greedy));
  const auto drawn = models::generate(*model, prompt, {.most = 6, .temperature = 2, .seed = 1});
  EXPECT_TRUE(at::equal(drawn, models::generate(*model, prompt, {.most = 6, .temperature = 2, .seed = 1})));
  EXPECT_FALSE(at::equal(drawn, models::generate(*model, prompt, {.most = 6, .temperature = 2, .seed = 2})));
  EXPECT_TRUE(model->is_training());
}

TEST(Generate, EndsRowsAtTheirEnd) {
  auto model = seeded(small());
  const auto prompt = text(4, 1).unsqueeze(0);
  const auto greedy = models::generate(*model, prompt, {.most = 6});
  std::vector<int64_t> heard;
  const auto end = greedy[0][5].item<int64_t>();
  const auto ended = models::generate(*model, prompt, {.most = 6, .ends = {end}, .listen = [&](int64_t token) { heard.push_back(token); }});
  EXPECT_LE(ended.size(1), 6);
  EXPECT_EQ(heard.back(), end);
  EXPECT_EQ(std::ssize(heard), ended.size(1) - 4);
  EXPECT_THAT(message_of<UsageError>([&] { models::generate(*model, prompt, {.most = 29}); }),
              HasSubstr("4 tokens and 29 new ones are more than"));
  EXPECT_THAT(message_of<UsageError>([&] { models::generate(*model, prompt, {.top_p = 0}); }), HasSubstr("top_p is 0"));
}

TEST(LlamaConfig, SurvivesItsFile) {
  const Folder folder;
  auto other = small(true);
  other.head_dim = 8;
  other.rope = {.theta = 5e5, .partial_rotary_factor = 0.5, .llama3 = nn::Llama3Scaling{}};
  other.eos_token_ids = {2, 3};
  other.bos_token_id = 1;
  LlamaConfig qwen{.model_type = "qwen2", .num_hidden_layers = 2, .tie_word_embeddings = true, .rope = {.factor = 2}};
  LlamaConfig smol{.model_type = "smollm3", .num_hidden_layers = 2, .no_rope_layers = {1, 0}, .eos_token_ids = {7}};
  LlamaConfig mixtral{.model_type = "mixtral", .experts = models::ExpertOptions{.intermediate_size = 11008, .router_aux_loss_coef = 0.5}};
  LlamaConfig sparse{.model_type = "qwen2_moe",
                     .num_hidden_layers = 4,
                     .experts = models::ExpertOptions{.intermediate_size = 16,
                                                      .shared_expert_intermediate_size = 24,
                                                      .decoder_sparse_step = 2,
                                                      .mlp_only_layers = {3},
                                                      .norm_topk_prob = false,
                                                      .output_router_logits = true}};
  LlamaConfig third{.model_type = "qwen3_moe", .num_hidden_layers = 2, .experts = models::ExpertOptions{.intermediate_size = 16}};
  EXPECT_TRUE(sparse.has_experts(1) && !sparse.has_experts(2) && !sparse.has_experts(3) && !LlamaConfig{}.has_experts(0));
  for (auto config : {LlamaConfig{}, other, qwen, smol, mixtral, sparse, third}) {
    config.num_key_value_heads = config.key_value_heads();
    config.head_dim = config.head_size();
    if (config.model_type == "mistral") config.layer_types = {"sliding_attention", "sliding_attention"};
    config.write(folder.path(), at::kBFloat16);
    EXPECT_EQ(LlamaConfig::read(folder.path()), config) << config.model_type;
  }
}

TEST(LlamaConfig, KnowsWhatTheFamilyHas) {
  const Folder folder;
  const auto read = [&](const std::string& json) {
    write_file(folder / "config.json", json);
    return LlamaConfig::read(folder.path());
  };
  const auto smol = read(R"({"model_type": "smollm3", "num_hidden_layers": 4, "use_sliding_window": true, "sliding_window": 4})");
  EXPECT_EQ(smol.no_rope_layers, (std::vector<int64_t>{1, 1, 1, 0}));
  for (int64_t layer = 0; layer < 4; layer++) EXPECT_EQ(smol.slides(layer), layer == 3);  // only layers without rotary embeddings slide
  const auto mistral =
      read(R"({"model_type": "mistral", "attention_bias": true, "mlp_bias": true, "eos_token_id": -1, "bos_token_id": -1})");
  EXPECT_EQ(mistral.sliding_window, 4096);
  EXPECT_TRUE(mistral.slides(0) && !mistral.attention_bias && !mistral.mlp_bias);
  EXPECT_TRUE(mistral.eos_token_ids.empty() && !mistral.bos_token_id);
  EXPECT_FALSE(read(R"({"model_type": "qwen2", "sliding_window": 8})").slides(27));
}

TEST(LlamaConfig, NamesWhatItCantTake) {
  const Folder folder;
  const auto refusal = [&](const std::string& json) {
    write_file(folder / "config.json", json);
    return message_of<ConfigError>([&] { LlamaConfig::read(folder.path()); });
  };
  const std::pair<const char*, const char*> wrong[] = {
      {R"({})", "config.json: model_type: missing: choose one of llama, mistral, mixtral, qwen2"},
      {R"({"model_type": "gpt2"})", "config.json: model_type: \"gpt2\": models::Llama... knows only llama, mistral"},
      {R"({"model_type": "llama", "hidden_act": "gelu"})", "hidden_act: \"gelu\": models::Llama... knows only \"silu\""},
      {R"({"model_type": "mistral", "num_hidden_layers": 1000000000000})", "num_hidden_layers: 1000000000000: this must be at most 65536"},
      {R"({"model_type": "llama", "hidden_size": "24"})", "hidden_size: \"24\": this must be an integer"},
      {R"({"model_type": "llama", "attention_bias": 1})", "attention_bias: 1: this must be true or false"},
      {R"({"model_type": "llama", "quantization_config": {}})", "quantization_config: {}: quantized weights can't be trained"},
      {R"({"model_type": "llama", "rope_scaling": {"type": "yarn"}})", "rope_scaling: type: \"yarn\": choose default, linear or llama3"},
      {R"({"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}})", "rope_parameters: factor: missing: llama3 needs it"},
      {R"({"model_type": "llama", "num_key_value_heads": 3})",
       "a Llama can't have num_key_value_heads 3: it must be a divisor of num_attention_heads"},
      {R"({"model_type": "llama", "partial_rotary_factor": 0.001})", "partial_rotary_factor 0.001"},
      {R"({"model_type": "qwen2", "layer_types": ["local"]})",
       "layer_types: [\"local\"]: this must be a list of full_attention and sliding_attention"},
      {R"({"model_type": "qwen3", "use_sliding_window": true, "sliding_window": 4, "layer_types": ["full_attention"]})",
       "a Llama can't have layer_types full_attention: it must be a list of 32 entries"},
      {R"({"model_type": "qwen2_moe", "num_experts": 2})", "num_experts_per_tok 4: it must be at most the number of experts"},
      {R"({"model_type": "mixtral", "router_jitter_noise": 0.1})", "router_jitter_noise: 0.1: models::Llama... knows only 0.0"},
      {R"({"model_type": "qwen3_moe", "mlp_only_layers": "1"})", "mlp_only_layers: \"1\": this must be a list of numbers of layers"},
      {R"({"model_type": "llama", "eos_token_id": "2"})", "eos_token_id: \"2\": this must be an integer, or a list of them"},
      {R"({"model_type": "llama", "eos_token_id": [1, 99999]})",
       "a Llama can't have a special token 99999: it must be a token of the vocabulary"},
  };
  for (const auto& [json, why] : wrong) EXPECT_THAT(refusal(json), HasSubstr(why)) << json;
  write_file(folder / "config.json", "[");
  EXPECT_THAT(message_of<IoError>([&] { LlamaConfig::read(folder.path()); }), HasSubstr("is damaged: it is not a JSON object"));
}

}  // namespace
}  // namespace tessera::testing::llama_test
