// Adapters are converted to GGUF files and back. With the files, as Python's gguf reads them, llama.cpp gets the weights of the merged
// model.
#include "tessera/llm/gguf_adapter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/llm/gguf_model.h"
#include "tessera/nn/layer_choice.h"
#include "tessera/nn/lora.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"
#include "tests/testing/small_llama.h"

namespace tessera::testing::gguf_adapter_test {
namespace {

using checkpoint::GgufFile;
using ::testing::AllOf;
using ::testing::HasSubstr;


/// An adapter with drawn values.
void write_adapter(const std::filesystem::path& folder, const models::LlamaConfig& config, const lora::Options& options) {
  torch::manual_seed(3);
  models::LlamaForCausalLM model(config);
  lora::apply(model, options);
  const torch::NoGradGuard no_grad;
  for (const auto& item : model->named_parameters()) {
    if (item.key().find(".lora_") != std::string::npos) item.value().normal_(0, 0.3);
  }
  checkpoint::save_adapter(model, folder, self_world());
}

struct Case {
  std::string name, type;
  lora::Options options;
  double alpha = 8;      // of the file
  bool is_exact = true;  // whether all layers have this alpha
};

std::vector<Case> cases() {
  return {
      {.name = "plain", .type = "llama", .options = {.r = 4, .lora_alpha = 8}},
      {.name = "pairs", .type = "smollm3", .options = {.r = 3, .lora_alpha = 8, .layers = {.target_modules = {"q_proj", "k_proj"}}}},
      {.name = "halves", .type = "qwen3", .options = {.r = 4, .lora_alpha = 8, .rank_pattern = {{"q_proj", 2}}}},
      {.name = "root", .type = "qwen2", .options = {.r = 4, .lora_alpha = 8, .use_rslora = true}, .alpha = 16},
      {.name = "ends",
       .type = "llama",
       .options = {.r = 4, .lora_alpha = 8, .layers = {.target_modules = {"embed_tokens", "lm_head", "k_proj", "layers.1.mlp.up_proj"}}}},
      {.name = "patterns",
       .type = "llama",
       .options =
           {.r = 4, .lora_alpha = 8, .use_rslora = true, .rank_pattern = {{"q_proj", 2}}, .alpha_pattern = {{"v_proj", 0}, {"k_proj", 3}}},
       .alpha = 16,
       .is_exact = false}};
}

TEST(GgufAdapter, GoesThereAndBack) {
  for (const auto& each : cases()) {
    SCOPED_TRACE(each.name);
    const Folder folder;
    const auto config = small_config(each.type);
    config.write(folder / "base");
    write_adapter(folder / "adapter", config, each.options);
    llm::write_gguf_adapter(folder / "adapter", folder / "adapter.gguf", folder / "base");
    EXPECT_EQ(GgufFile(folder / "adapter.gguf").number("adapter.lora.alpha"), each.alpha);
    llm::write_peft_adapter(folder / "adapter.gguf", folder / "back");
    const auto before = checkpoint::read_adapter(folder / "adapter"), after = checkpoint::read_adapter(folder / "back");
    ASSERT_EQ(after.layers.size(), before.layers.size());
    for (const auto& [layer, weights] : before.layers) {
      const auto& back = after.layers.at(layer);
      EXPECT_TRUE(at::equal(back.a, weights.a)) << layer;
      EXPECT_EQ(back.of_embedding, weights.of_embedding) << layer;
      EXPECT_TRUE(at::allclose(back.b * back.scaling, weights.b * weights.scaling, 1e-6, 0)) << layer;
      if (!each.is_exact) continue;
      EXPECT_TRUE(at::equal(back.b, weights.b)) << layer;
      EXPECT_EQ(back.scaling, weights.scaling) << layer;
    }
    // A model can load the adapter with the options that are read, which have the rank of each layer.
    models::LlamaForCausalLM model(config);
    const auto options = checkpoint::read_adapter_config(folder / "back");
    for (const auto& [layer, weights] : before.layers) {
      auto other = layer;
      std::ranges::replace(other, '.', '_');
      for (const auto& [pattern, rank] : options.rank_pattern) EXPECT_FALSE(nn::matches(other, pattern)) << pattern << " matches " << other;
    }
    lora::apply(model, options);
    checkpoint::load_adapter(model, folder / "back");
    // A second conversion there and back gives the same bytes.
    llm::write_gguf_adapter(folder / "back", folder / "back.gguf", folder / "base");
    llm::write_peft_adapter(folder / "back.gguf", folder / "again", folder / "base");
    EXPECT_EQ(read_file(folder / "again/adapter_model.safetensors"), read_file(folder / "back/adapter_model.safetensors"));
    EXPECT_THAT(read_file(folder / "again/adapter_config.json"), HasSubstr((folder / "base").string()));
  }
}

TEST(GgufAdapter, AddsToWeightsInLlamaCppWhatMergingAddsHere) {
  const Folder folder;
  std::vector<std::string> command = {TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/gguf_files.py", "adapted"};
  for (const auto& each : cases()) {
    const auto here = folder / each.name;
    write_model(here / "base", small_config(each.type));
    write_adapter(here / "adapter", small_config(each.type), each.options);
    llm::write_gguf(here / "base", here / "model.gguf", {.code = "F32"});
    llm::write_gguf_adapter(here / "adapter", here / "adapter.gguf", here / "model.gguf");
    checkpoint::merge_adapter(here / "base", here / "adapter", here / "merged");
    llm::write_description(here / "base", here / "merged");
    llm::write_gguf(here / "merged", here / "merged.gguf", {.code = "F32"});
    command.push_back(here);
  }
  const auto added = run_program(command);
  if (added.status == kNoPackage) GTEST_SKIP() << "build/python has no package gguf";
  ASSERT_EQ(added.status, 0) << added.output;
  for (const auto& each : cases()) {
    const checkpoint::SafetensorsFile theirs(folder / each.name / "adapted.safetensors");
    const GgufFile ours(folder / each.name / "merged.gguf"), base(folder / each.name / "model.gguf");
    int changed = 0;
    for (const auto& name : theirs.names()) {
      const auto merged = checkpoint::read_gguf_tensor(ours, name);
      EXPECT_TRUE(at::allclose(theirs.read(name), merged, 1e-5, 1e-5)) << each.name << " " << name;
      changed += at::equal(merged, checkpoint::read_gguf_tensor(base, name)) ? 0 : 1;
    }
    EXPECT_EQ(changed, each.name == "pairs" ? 4 : each.name == "ends" ? 5 : each.name == "patterns" ? 12 : 14) << each.name;
  }
}

TEST(GgufAdapter, IsReadAsLlamaCppConvertsIt) {
  const Folder folder;
  const auto config = small_config("llama");
  config.write(folder / "base");
  write_adapter(folder / "adapter", config, {.r = 4, .lora_alpha = 2.1});
  const auto converted = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/gguf_files.py", "adapter", folder / "adapter", "4", "2"});
  if (converted.status == kNoPackage) GTEST_SKIP() << "build/python has no package gguf";
  ASSERT_EQ(converted.status, 0) << converted.output;
  EXPECT_THAT(message_of<ConfigError>([&] { llm::write_peft_adapter(folder / "adapter.gguf", folder / "back"); }),
              HasSubstr("does not say how many heads the model has"));
  llm::write_peft_adapter(folder / "adapter.gguf", folder / "back", folder / "base");
  EXPECT_EQ(read_file(folder / "back/adapter_model.safetensors"), read_file(folder / "adapter/adapter_model.safetensors"));
  EXPECT_EQ(checkpoint::read_adapter_config(folder / "back").lora_alpha, 2.1);
}

TEST(GgufAdapter, NamesWhatHasNoPlaceThere) {
  const Folder folder;
  const auto config = small_config("llama");
  config.write(folder / "base");
  const auto refusal = [&](const lora::Options& options, const models::LlamaConfig& of) {
    write_adapter(folder / "adapter", of, options);
    const auto said = message_of<Error>([&] { llm::write_gguf_adapter(folder / "adapter", folder / "x.gguf", folder / "base"); });
    EXPECT_FALSE(std::filesystem::exists(folder / "x.gguf"));
    return said;
  };
  EXPECT_THAT(refusal({.use_dora = true}, config),
              AllOf(HasSubstr("DoRA (use_dora) has no place there"), HasSubstr("tessera ckpt merge-adapter")));
  EXPECT_THAT(refusal({.r = 4, .init_lora_weights = lora::Init::Pissa}, config), HasSubstr("PiSSA"));
  EXPECT_THAT(refusal({.modules_to_save = {"lm_head"}}, config), HasSubstr("'base_model.model.lm_head.weight' has no place there"));
  auto other = config;
  other.attention_bias = true;
  EXPECT_THAT(refusal({.bias = lora::Bias::All}, other), HasSubstr("bias' has no place there"));
  other = config;
  other.intermediate_size = 64;
  EXPECT_THAT(refusal({.r = 4}, other),
              AllOf(HasSubstr("'model.layers.0.mlp.down_proj' is [64, 96] in "), HasSubstr("with [4, 64] and [64, 4]")));
  other = config;
  other.num_hidden_layers = 3;
  EXPECT_THAT(refusal({}, other), AllOf(HasSubstr("is of another model"), HasSubstr("no layer 'model.layers.2.")));
  other = config;
  other.tie_word_embeddings = true;
  other.write(folder / "base");
  EXPECT_THAT(refusal({.layers = {.target_modules = {"embed_tokens"}}}, other), HasSubstr("embeddings that are also the output head"));
  EXPECT_THAT(refusal({.layers = {.target_modules = {"lm_head"}}}, config), HasSubstr("'lm_head' has an adapter"));
}

TEST(GgufAdapter, ReplacesNothingThatItIsMadeOf) {
  const Folder folder;
  const auto config = small_config("llama");
  write_model(folder / "base", config);
  write_adapter(folder / "adapter", config, {});
  llm::write_gguf(folder / "base", folder / "base.gguf");
  for (const auto& [file, base] : {std::pair("base.gguf", "base.gguf"), {"adapter/adapter_model.safetensors", "base"}}) {
    const auto before = read_file(folder / file);
    EXPECT_THAT(message_of<UsageError>([&] { llm::write_gguf_adapter(folder / "adapter", folder / file, folder / base); }),
                HasSubstr("write elsewhere"));
    EXPECT_EQ(read_file(folder / file), before);
  }
  EXPECT_THAT(message_of<IoError>([&] { llm::write_gguf_adapter(folder / "adapter", folder / "no/x.gguf", folder / "base"); }),
              HasSubstr("no/x.gguf"));
  llm::write_gguf_adapter(folder / "adapter", folder / "adapter.gguf", folder / "base");
  EXPECT_THAT(message_of<UsageError>([&] { llm::write_peft_adapter(folder / "adapter.gguf", folder / "adapter.gguf"); }),
              HasSubstr("write elsewhere"));
}

/// Writes a copy of the file with one changed entry.
void write_changed(const std::filesystem::path& from, const std::filesystem::path& to, const std::string& key, const std::string& value) {
  const GgufFile file(from);
  auto metadata = file.metadata();
  for (auto& [name, entry] : metadata) {
    if (name == key) entry = {checkpoint::GgufType::Text, value};
  }
  auto tensors = file.tensors();
  for (auto& tensor : tensors) {
    if (tensor.name == key) tensor.name = value;
  }
  checkpoint::GgufWriter writer(to, metadata, tensors);
  for (const auto& tensor : file.tensors()) writer.write(checkpoint::read_gguf_tensor(file, tensor.name));
  writer.close();
}

TEST(GgufAdapter, NamesWhatIsWrongInAFile) {
  const Folder folder;
  write_model(folder / "base", small_config("llama"));
  write_adapter(folder / "adapter", small_config("llama"), {.r = 4});
  const auto good = folder / "adapter.gguf", bad = folder / "bad.gguf";
  llm::write_gguf_adapter(folder / "adapter", good, folder / "base");
  const auto refusal = [&](const std::filesystem::path& base = {}) {
    const auto said = message_of<Error>([&] { llm::write_peft_adapter(bad, folder / "back", base); });
    EXPECT_FALSE(std::filesystem::exists(folder / "back"));
    return said;
  };
  const auto changed = [&](const std::string& key, const std::string& value) {
    write_changed(good, bad, key, value);
    return refusal();
  };
  EXPECT_THAT(changed("general.type", "model"), HasSubstr("is not an adapter"));
  EXPECT_THAT(changed("adapter.type", "control"), HasSubstr("adapter.type: 'control' is not read here"));
  EXPECT_THAT(changed("general.architecture", "gemma"), HasSubstr("'gemma' is not one of the architectures of models::Llama"));
  EXPECT_THAT(changed("blk.0.attn_q.weight.lora_a", "blk.0.attn_norm.weight"),
              HasSubstr("'blk.0.attn_norm.weight' has no place in an adapter"));
  EXPECT_THAT(changed("blk.0.attn_q.weight.lora_a", "blk.0.ssm_in.weight.lora_a"), HasSubstr("'blk.0.ssm_in.weight.lora_a' has no place"));
  EXPECT_THAT(changed("blk.0.attn_q.weight.lora_a", "blk.7.attn_q.weight.lora_a"),
              HasSubstr("'model.layers.0.self_attn.q_proj' don't fit together"));
  EXPECT_THAT(changed("llama.attention.head_count", "4"), HasSubstr("'llama.attention.head_count' has the wrong type"));
  const auto whole = read_file(good);
  for (size_t size = 4; size < whole.size(); size += 997) {
    write_file(bad, whole.substr(0, size));
    EXPECT_THAT(refusal(), HasSubstr("bad.gguf is damaged or cut off")) << size;
  }
  write_file(bad, whole);
  small_config("qwen2").write(folder / "other");
  EXPECT_THAT(refusal(folder / "other"), HasSubstr("is for the architecture 'llama'"));
  auto narrow = small_config("llama");
  narrow.intermediate_size = 64;
  narrow.write(folder / "narrow");
  EXPECT_THAT(refusal(folder / "narrow"), HasSubstr("does not fit"));
  // Reading it as a model is an error.
  EXPECT_THAT(message_of<ConfigError>([&] { llm::read_config(good); }), HasSubstr("holds an adapter and no model"));
  EXPECT_THAT(checkpoint::to_table(checkpoint::inspect(good)), HasSubstr("a GGUF file with an adapter"));
}

TEST(GgufAdapter, IsToldFromAModel) {
  const Folder folder;
  write_model(folder / "base", small_config("llama"));
  write_adapter(folder / "adapter", small_config("llama"), {});
  llm::write_gguf(folder / "base", folder / "base.gguf");
  llm::write_gguf_adapter(folder / "adapter", folder / "adapter.gguf", folder / "base");
  for (const auto* adapter : {"adapter", "adapter.gguf"}) EXPECT_TRUE(llm::is_adapter(folder / adapter));
  for (const auto* none : {"base", "base.gguf", "nothing"}) EXPECT_FALSE(llm::is_adapter(folder / none));
}

}  // namespace
}  // namespace tessera::testing::gguf_adapter_test
