// GGUF files of language models, as anybody may hand them to us: their tensors, and what they say of the model, its tokens
// and adapters.
#include <ATen/ATen.h>

#include "fuzz.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/llm/gguf_adapter.h"
#include "tessera/llm/gguf_model.h"

namespace tessera::fuzz {
namespace {

void read_gguf(std::span<const uint8_t> data) {
  static const auto path = folder() + "/file.gguf";
  write_file(path, data);
  if (!checkpoint::is_gguf_file(path)) return;
  expect_own_errors([] {
    const checkpoint::CatalogReader stored(checkpoint::read_gguf(checkpoint::GgufFile(path)));
    for (const auto& [name, tensor] : stored.catalog().tensors) stored.read(name);
  });
  expect_own_errors([] { llm::read_config(path); });
  expect_own_errors([] { llm::write_peft_adapter(path, folder() + "/adapter"); });
  expect_own_errors([] { llm::read_tokenizer(path).encode("the 12\xff"); });
}

using checkpoint::GgufType;

std::string written(const checkpoint::GgufMetadata& metadata, const std::vector<checkpoint::GgufTensor>& tensors) {
  const auto path = folder() + "/seed";
  checkpoint::GgufWriter writer(path, metadata, tensors);
  for (const auto& tensor : tensors) writer.write(at::ones(tensor.sizes));
  writer.close();
  return InputFile(path).read_all();
}

checkpoint::GgufMetadata of_a_model() {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; byte++) tokens.push_back(std::string(1, static_cast<char>(byte)));
  return {{"general.architecture", {GgufType::Text, std::string("llama")}},
          {"llama.embedding_length", {GgufType::U32, int64_t{8}}},
          {"llama.feed_forward_length", {GgufType::U32, int64_t{8}}},
          {"llama.block_count", {GgufType::U32, int64_t{1}}},
          {"llama.attention.head_count", {GgufType::U32, int64_t{2}}},
          {"llama.context_length", {GgufType::U64, int64_t{16}}},
          {"llama.rope.freq_base", {GgufType::F32, 10000.0}},
          {"tokenizer.ggml.model", {GgufType::Text, std::string("gpt2")}},
          {"tokenizer.ggml.pre", {GgufType::Text, std::string("smollm")}},
          {"tokenizer.ggml.tokens", {GgufType::Text, tokens}},
          {"tokenizer.ggml.merges", {GgufType::Text, std::vector<std::string>{"a b"}}},
          {"tokenizer.ggml.token_type", {GgufType::I32, std::vector<int64_t>{3, 4}}}};
}

checkpoint::GgufMetadata of_an_adapter() {
  return {{"general.architecture", {GgufType::Text, std::string("llama")}},
          {"general.type", {GgufType::Text, std::string("adapter")}},
          {"adapter.type", {GgufType::Text, std::string("lora")}},
          {"adapter.lora.alpha", {GgufType::F32, 8.0}},
          {"llama.attention.head_count", {GgufType::U32, int64_t{2}}}};
}

/// A tensor of this code, of which the writer may know only the size.
std::string in_code(const checkpoint::BlockCode& code) {
  constexpr std::string_view kName = "the only one";
  auto bytes = written({}, {{.name = std::string(kName), .sizes = {256}, .code = checkpoint::find_block_code("F32")}});
  bytes[bytes.find(kName) + kName.size() + sizeof(uint32_t) + sizeof(uint64_t)] = static_cast<char>(code.number);  // behind its dimension
  return bytes;
}

std::vector<std::string> seeds_of_gguf() {
  const auto code = [](const char* name) { return checkpoint::find_block_code(name); };
  auto large = of_a_model();
  std::get<int64_t>(large[3].second.data) = 1'000'000'000'000;
  std::get<int64_t>(large[4].second.data) = 1'000'000'000'000;
  std::vector<std::string> result = {
      written(large, {{.name = "token_embd.weight", .sizes = {}, .code = code("F32")},
                      {.name = "blk.0.attn_q.weight", .sizes = {8, 0}, .code = code("F32")}}),
      written({}, {{.name = "a", .sizes = {2, 3}, .code = code("F16")}}),
      written(of_an_adapter(), {{.name = "blk.0.attn_q.weight.lora_a", .sizes = {2, 8}, .code = code("F32")},
                                {.name = "blk.0.attn_q.weight.lora_b", .sizes = {8, 2}, .code = code("F16")}}),
      written(of_a_model(), {{.name = "token_embd.weight", .sizes = {256, 32}, .code = code("Q8_0")},
                             {.name = "blk.0.attn_q.weight", .sizes = {8, 8}, .code = code("F32")},
                             {.name = "rope_freqs.weight", .sizes = {2}, .code = code("F32")}})};
  for (const auto& each : checkpoint::block_codes()) result.push_back(in_code(each));
  return result;
}

const Target target_gguf("gguf", read_gguf, seeds_of_gguf);

}  // namespace
}  // namespace tessera::fuzz
