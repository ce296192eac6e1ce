// The results of a decoder do not depend on how it gets texts: one by one or packed into a row, at once or token by token, sharded or not.
#include "tessera/models/llama.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

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

LlamaConfig small_of(const std::string& type) {
  auto config = small(/*sliding=*/true);
  config.model_type = type;
  config.initializer_range = 0.5;
  if (type == "phi3") config.layer_types = {"sliding_attention", "sliding_attention"};
  if (type == "gemma2") config.attn_logit_softcapping = 2, config.final_logit_softcapping = 3, config.query_pre_attn_scalar = 12;
  if (type == "gemma3_text") config.rope_local_base_freq = 50;
  return config;
}

std::vector<LlamaConfig> shapes() {
  return {small(), small(/*sliding=*/true), small_of("gemma2"), small_of("gemma3_text"), small_of("phi3")};
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

TEST(Llama, AddsNoiseToEmbeddingsInTrainingOnly) {
  auto model = seeded(small());
  constexpr double kLarge = 1e4, kAlpha = 5;
  const torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) {
    const auto& name = item.key();
    if (name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight")) item.value().zero_();  // so layers change nothing
  }
  model->model->embed_tokens->weight.zero_().select(1, 0).fill_(kLarge);
  model->model->neftune_alpha = kAlpha;
  const auto noise = [&] {
    const auto states = model->model->forward(at::zeros({40, 32}, at::kLong));  // normalised, so it is their ratios that tell
    return states.narrow(2, 1, 23) / states.narrow(2, 0, 1) * kLarge;
  };
  const auto most = kAlpha / std::sqrt(32 * 24), drawn = noise().abs().max().item<double>();
  EXPECT_LT(drawn, 1.001 * most);
  EXPECT_GT(drawn, 0.99 * most);
  EXPECT_NEAR(noise().abs().mean().item<double>(), most / 2, 0.02 * most);
  EXPECT_NEAR(noise().mean().item<double>(), 0, 0.02 * most);
  model->eval();
  EXPECT_EQ(noise().abs().max().item<double>(), 0);
}

TEST(Llama, SeesNothingOfOtherDocumentsInARow) {
  for (const auto& config : shapes()) {
    auto model = seeded(config);
    const auto first = text(5, 1), second = text(9, 2), third = text(2, 3);
    const auto row = at::cat({first, second, third}).unsqueeze(0),
               positions = at::cat({at::arange(5), at::arange(9), at::arange(2)}).unsqueeze(0);
    const auto packed = model(row, models::LlamaInput{.positions = positions});
    const auto apart = at::cat({model(first.unsqueeze(0)), model(second.unsqueeze(0)), model(third.unsqueeze(0))}, 1);
    EXPECT_TRUE(at::allclose(packed, apart, 1e-4, 1e-5)) << config.model_type;
    // In a batch, each row has its own documents.
    const auto two = model(at::cat({row, row}), models::LlamaInput{.positions = at::cat({positions, at::arange(16).unsqueeze(0)})});
    EXPECT_TRUE(at::allclose(two.narrow(0, 0, 1), packed, 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(two.narrow(0, 1, 1), model(row), 1e-4, 1e-5));
  }
}

TEST(Llama, GoesOnFromItsCache) {
  for (const auto& config : shapes()) {
    auto model = seeded(config);
    const torch::NoGradGuard no_grad;
    const auto tokens = at::stack({text(14, 1), text(14, 2)});
    models::LlamaCache cache(20);
    std::vector<at::Tensor> scores;
    for (const auto& [begin, length] : {std::pair<int64_t, int64_t>{0, 6}, {6, 1}, {7, 4}, {11, 1}, {12, 2}})
      scores.push_back(model(tokens.narrow(1, begin, length), models::LlamaInput{.cache = &cache}));
    EXPECT_EQ(cache.length(), 14);
    EXPECT_TRUE(at::allclose(at::cat(scores, 1), model(tokens), 1e-4, 1e-5)) << config.model_type;
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
  auto tied = small();
  tied.tie_word_embeddings = true;
  for (const auto& config : {small(), tied, small_of("gemma2"), small_of("gemma3_text"), small_of("phi3")}) {
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
  const auto ended = models::generate(*model, prompt, {.most = 6, .ends = {end}, .listen = [&](int64_t token) { heard.push_back(token); return true; }});
  EXPECT_LE(ended.size(1), 6);
  EXPECT_EQ(heard.back(), end);
  EXPECT_EQ(std::ssize(heard), ended.size(1) - 4);
  EXPECT_THAT(message_of<UsageError>([&] { models::generate(*model, prompt, {.most = 29}); }),
              HasSubstr("4 tokens and 29 new ones are more than"));
  EXPECT_THAT(message_of<UsageError>([&] { models::generate(*model, prompt, {.top_p = 0}); }), HasSubstr("top_p is 0"));
}

TEST(Generate, ContinuesWithACacheOfTheCaller) {
  for (const bool sliding : {false, true}) {
    auto model = seeded(small(sliding));
    const auto prompt = text(9).unsqueeze(0);
    const auto whole = models::generate(*model, prompt, {.most = 12, .repetition_penalty = 1.3});
    models::LlamaCache cache(21);
    models::generate(*model, prompt.narrow(1, 0, 3), {.most = 8, .cache = &cache});  // another text, of which three tokens are kept
    EXPECT_EQ(cache.length(), 10);
    cache.keep(3);
    int64_t heard = 0;
    const auto begun = models::generate(*model, prompt, {.most = 12, .repetition_penalty = 1.3, .listen = [&](int64_t) { return ++heard < 4; }, .cache = &cache});
    EXPECT_TRUE(at::equal(begun, whole.narrow(1, 0, 13)));
    EXPECT_EQ(cache.length(), 12);
    EXPECT_TRUE(at::equal(models::generate(*model, begun, {.most = 8, .repetition_penalty = 1.3, .cache = &cache}), whole));
    EXPECT_THAT(message_of<UsageError>([&] { models::generate(*model, prompt, {.most = 2, .cache = &cache}); }), HasSubstr("the cache holds 20 tokens of a text of 9"));
  }
  auto model = seeded(small());
  EXPECT_THAT(message_of<UsageError>([&] { models::generate(*model, text(4).unsqueeze(0), {.min_p = 2}); }), HasSubstr("min_p 2"));
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
  auto gemma2 = small_of("gemma2"), gemma3 = small_of("gemma3_text"), phi = small_of("phi3"), yarn = small();
  gemma3.query_pre_attn_scalar = 9;
  phi.rope = {.partial_rotary_factor = 0.7, .longrope = nn::LongRopeScaling{{1, 1.5}, {2, 4}, 16}};
  phi.rope.attention_factor = nn::usual_attention_factor(phi.rope, phi.max_position_embeddings);
  yarn.rope = {.yarn = nn::YarnScaling{4, 16, 2, 8, false}, .attention_factor = 1.25};
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
  for (auto config : {LlamaConfig{}, other, qwen, smol, gemma2, gemma3, phi, yarn, mixtral, sparse, third}) {
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
  const auto gemma = read(R"({"model_type": "gemma3_text", "num_hidden_layers": 12})");
  for (int64_t layer = 0; layer < 12; layer++) EXPECT_EQ(gemma.slides(layer), layer != 5 && layer != 11);
  const auto phi = read(R"({"model_type": "phi3", "hidden_size": 8, "num_attention_heads": 1, "max_position_embeddings": 8192,
      "rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2]}})");
  EXPECT_EQ(phi.rope.longrope->original_max_position_embeddings, 4096);
  EXPECT_NEAR(phi.rope.attention_factor, std::sqrt(1 + 1.0 / 12), 1e-12);
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
      {R"({"model_type": "llama", "rope_scaling": {"type": "dynamic"}})",
       "rope_scaling: type: \"dynamic\": choose default, linear, llama3 or yarn; phi3 also has longrope"},
      {R"({"model_type": "llama", "rope_scaling": {"type": "yarn"}})", "rope_scaling: factor: missing: yarn needs it"},
      {R"({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": 1}})", "short_factor: 1: this must be a list of numbers"},
      {R"({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}})",
       "can't have short_factor and long_factor 1: it must be 64 numbers above 0"},
      {R"({"model_type": "gemma3"})", "model_type: \"gemma3\": pictures are not read here; take the GGUF file"},
      {R"({"model_type": "gemma2", "hidden_activation": "silu"})", "knows only \"gelu_pytorch_tanh\""},
      {R"({"model_type": "gemma2", "attention_dropout": 0.1})", "attention_dropout 0.1: it must be 0 beside attn_logit_softcapping"},
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
      {R"({"model_type": "qwen3_moe", "mlp_only_layers": "1"})", "mlp_only_layers: \"1\": this must be a list of integers"},
      {R"({"model_type": "llama", "eos_token_id": "2"})", "eos_token_id: \"2\": this must be an integer"},
      {R"({"model_type": "llama", "eos_token_id": [1, 99999]})",
       "a Llama can't have a special token 99999: it must be a token of the vocabulary"},
  };
  for (const auto& [json, why] : wrong) EXPECT_THAT(refusal(json), HasSubstr(why)) << json;
  write_file(folder / "config.json", "[");
  EXPECT_THAT(message_of<IoError>([&] { LlamaConfig::read(folder.path()); }), HasSubstr("is damaged: it is not a JSON object"));
}

}  // namespace
}  // namespace tessera::testing::llama_test
