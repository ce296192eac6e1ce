// Reads the tokenizer of a language model from the metadata of a GGUF file, and writes it there.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/unigram.h"
#include "tessera/llm/gguf_parts.h"

namespace tessera::llm {
namespace {

using checkpoint::GgufFile;
using checkpoint::GgufMetadata;
using checkpoint::GgufType;

// The meanings of the numbers in tokenizer.ggml.token_type.
constexpr int64_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6;

/// Whether this added token of a Phi-3 leaves the spaces behind it.
bool keeps_spaces(std::string_view token) {
  return token == "<unk>" || token == "<s>" || token == "<|endoftext|>";
}

}  // namespace

bool is_phi3(std::string_view name) {
  return lower(name).find("phi-3") != std::string::npos || lower(name).find("phi3") != std::string::npos;
}

data::Tokenizer tokenizer_in_gguf(const std::filesystem::path& path) {
  const GgufFile file(path);
  const auto missing = [&](const char* key) { return ConfigError("{} has no {}", path, key); };
  const auto model = file.text("tokenizer.ggml.model");
  if (!model) throw missing("tokenizer.ggml.model");
  const bool is_gpt2 = *model == "gpt2", is_llama = *model == "llama";
  const auto *tokens = file.texts("tokenizer.ggml.tokens"), *merges = file.texts("tokenizer.ggml.merges");
  const auto* scores = file.numbers("tokenizer.ggml.scores");
  if (tokens == nullptr) throw missing("tokenizer.ggml.tokens");
  if (is_gpt2 && merges == nullptr) throw missing("tokenizer.ggml.merges");
  const auto pre = is_gpt2 ? file.text("tokenizer.ggml.pre") : "";
  if (!pre) throw missing("tokenizer.ggml.pre");
  const auto flag = [&](const char* key, bool standard) { return file.integer(fmt::format("tokenizer.ggml.{}", key)).value_or(standard) != 0; };
  data::BpeVocabulary vocabulary{.tokens = *tokens,
                                 .merges = is_gpt2 ? *merges : std::vector<std::string>(),
                                 .added = {},
                                 .special = {},
                                 .pre = *pre,
                                 .add_bos = flag("add_bos_token", is_llama || data::adds_bos(*pre)),
                                 .add_eos = flag("add_eos_token", !is_gpt2 && !is_llama),
                                 .chat_template = file.text("tokenizer.chat_template").value_or(""),
                                 .model = *model};
  if (!is_gpt2) {
    if (scores != nullptr) vocabulary.scores = *scores;
    vocabulary.spaces = {.added = flag("add_space_prefix", is_llama), .merged = flag("remove_extra_whitespaces", false)};
    if (const auto* table = file.integers("tokenizer.ggml.precompiled_charsmap")) vocabulary.spaces.charsmap.assign(table->begin(), table->end());
  }
  if (const auto* types = file.integers("tokenizer.ggml.token_type")) {
    for (size_t id = 0; id < std::min(types->size(), tokens->size()); id++) {
      const auto type = (*types)[id];
      const bool is_special = type == kControl || (type == kUnknown && !is_gpt2);
      if (is_special || type == kUserDefined) vocabulary.added.push_back(static_cast<int32_t>(id));
      if (is_special) vocabulary.special.push_back(static_cast<int32_t>(id));
    }
  }
  const auto token = [&](const char* key) {
    const auto id = file.integer(fmt::format("tokenizer.ggml.{}_token_id", key));
    return id ? std::optional(static_cast<int32_t>(*id)) : std::nullopt;
  };
  vocabulary.bos = token("bos");
  vocabulary.eos = token("eos");
  vocabulary.pad = token("padding");
  vocabulary.unknown = token("unknown");
  if (!is_gpt2) {
    // llama.cpp's standards.
    const auto standard = [&](std::optional<int32_t>& id, int32_t number) {
      if (!id && std::cmp_less(number, tokens->size())) id = number;
    };
    standard(vocabulary.unknown, is_llama ? 0 : 2);
    if (is_llama) standard(vocabulary.bos, 1);
    standard(vocabulary.eos, is_llama ? 2 : 1);
    if (is_phi3(file.text("general.name").value_or(""))) {
      for (const auto id : vocabulary.added) {
        if (!keeps_spaces((*tokens)[static_cast<size_t>(id)])) vocabulary.rstrip.push_back(id);
      }
    }
  }
  try {
    return data::Tokenizer(vocabulary);
  } catch (const ConfigError&) {
    std::rethrow_exception(with_context(path.string() + ": "));
  }
}

void add_tokenizer(GgufMetadata& metadata, const data::Tokenizer& tokenizer, const models::LlamaConfig& config) {
  auto vocabulary = tokenizer.vocabulary();
  std::vector<int64_t> types(static_cast<size_t>(config.vocab_size), kNormal);
  for (const auto id : vocabulary.added) types.at(static_cast<size_t>(id)) = kUserDefined;
  for (const auto id : vocabulary.special) types.at(static_cast<size_t>(id)) = kControl;
  if (vocabulary.model != "gpt2") {
    for (size_t id = 0; id < vocabulary.tokens.size(); id++)
      if (data::byte_of_piece(vocabulary.tokens[id])) types[id] = kByte;
    if (vocabulary.unknown) types.at(static_cast<size_t>(*vocabulary.unknown)) = kUnknown;
  }
  // A model's vocabulary may be larger than its tokenizer's.
  const auto vocabulary_size = static_cast<size_t>(config.vocab_size);
  vocabulary.tokens.resize(vocabulary_size);
  for (size_t id = 0; id < vocabulary.tokens.size(); id++) {
    if (!vocabulary.tokens[id].empty()) continue;
    vocabulary.tokens[id] = fmt::format("[PAD{}]", id);
    types[id] = kUnused;
  }
  const auto add = [&](const char* name, checkpoint::GgufValue value) {
    metadata.emplace_back(fmt::format("tokenizer.ggml.{}", name), std::move(value));
  };
  add("model", text(vocabulary.model));
  add("pre", text(vocabulary.pre == "llama3" ? "llama-bpe" : vocabulary.pre == "gpt2" ? "gpt-2" : vocabulary.pre.empty() ? "default" : vocabulary.pre));
  add("tokens", {GgufType::Text, std::move(vocabulary.tokens)});
  add("token_type", {GgufType::I32, std::move(types)});
  if (vocabulary.model == "gpt2") {
    add("merges", {GgufType::Text, std::move(vocabulary.merges)});
  } else {
    vocabulary.scores.resize(vocabulary_size);
    add("scores", {GgufType::F32, std::move(vocabulary.scores)});
    add("add_space_prefix", {GgufType::Bool, static_cast<int64_t>(vocabulary.spaces.added)});
    add("remove_extra_whitespaces", {GgufType::Bool, static_cast<int64_t>(vocabulary.spaces.merged)});
    const auto& table = vocabulary.spaces.charsmap;
    if (!table.empty()) add("precompiled_charsmap", {GgufType::U8, std::vector<int64_t>(table.begin(), table.end())});
    if (vocabulary.unknown) add("unknown_token_id", u32(*vocabulary.unknown));
  }
  const auto bos = vocabulary.bos ? std::optional<int64_t>(*vocabulary.bos) : config.bos_token_id;
  if (bos) add("bos_token_id", u32(*bos));
  if (vocabulary.eos || !config.eos_token_ids.empty())
    add("eos_token_id", u32(vocabulary.eos ? *vocabulary.eos : config.eos_token_ids.front()));
  if (config.eos_token_ids.size() > 1) add("eot_token_id", u32(config.eos_token_ids[1]));
  if (config.pad_token_id) add("padding_token_id", u32(*config.pad_token_id));
  add("add_bos_token", {GgufType::Bool, static_cast<int64_t>(vocabulary.add_bos)});
  if (vocabulary.add_eos || vocabulary.model == "t5") add("add_eos_token", {GgufType::Bool, static_cast<int64_t>(vocabulary.add_eos)});
  if (!vocabulary.chat_template.empty()) metadata.emplace_back("tokenizer.chat_template", text(std::move(vocabulary.chat_template)));
}

}  // namespace tessera::llm
