// A language model in a GGUF file: its shape, its tokens, and how a folder of the Hugging Face Hub becomes such a file.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "tessera/data/tokenizer.h"
#include "tessera/models/llama_config.h"

namespace tessera::llm {

/// The shape of a model: of a folder with config.json, or of a GGUF file. Throws ConfigError, which names the key, for a model that is none
/// of models::Llama..., and IoError for a damaged file.
models::LlamaConfig read_config(const std::filesystem::path& path);
/// The tokens of a model: of a folder with tokenizer.json, or of a GGUF file.
data::Tokenizer read_tokenizer(const std::filesystem::path& path);

struct GgufOptions {
  /// Of matrices: F32, F16, BF16, Q8_0, Q5_0, Q4_0 or Q4_K; vectors are F32. With fewer than eight bits, the output layer (or the
  /// embeddings that it shares) is in Q8_0. Rows that are no whole blocks of Q4_K are in Q5_0, as llama.cpp does it, and where that has
  /// none, in F32.
  std::string code = "F16";
  std::string name = {};  // general.name; that of the folder unless given
};

/// Writes a file that llama.cpp and its relatives run, of a folder with config.json, tokenizer.json and weights. Takes the memory of one
/// tensor.
void write_gguf(const std::filesystem::path& folder, const std::filesystem::path& file, const GgufOptions& options = {});

/// Throws ConfigError, which names `model`, if something of the model has no place in such a file.
void expect_gguf_place(const models::LlamaConfig& config, const data::Tokenizer& tokenizer, const std::filesystem::path& model);

/// Whether there is something for write_description: a GGUF file, or a folder with config.json.
bool has_description(const std::filesystem::path& model);
/// That of most values of a model's files, as they are read: float32 where they are quantized.
at::ScalarType dtype_of_weights(const std::filesystem::path& model);
/// What a folder has besides the weights: config.json and the files of the tokenizer, of a GGUF file or of another folder, whatever model
/// that describes. `dtype`: that of the weights beside them, if it is another one than in the model's files.
void write_description(const std::filesystem::path& model, const std::filesystem::path& folder, std::optional<at::ScalarType> dtype = {});
/// The way back: a folder with config.json, tokenizer.json and weights, which are decoded to float32 where they are quantized.
void write_hub(const std::filesystem::path& file, const std::filesystem::path& folder);

}  // namespace tessera::llm
