// Reads the shape and the tokenizer of a language model in a GGUF file, and converts between such files and folders of the Hugging Face
// Hub.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "tessera/data/tokenizer.h"
#include "tessera/models/llama_config.h"

namespace tessera::llm {

/// Returns the shape of the model in a folder with config.json, or in a GGUF file. Throws ConfigError, which names the key, if
/// models::LlamaForCausalLM can't be that model, and IoError for a damaged file.
models::LlamaConfig read_config(const std::filesystem::path& path);
/// Returns the tokenizer of a folder with tokenizer.json or tokenizer.model, or of a GGUF file.
data::Tokenizer read_tokenizer(const std::filesystem::path& path);

struct GgufOptions {
  /// The code of matrices: F32, F16, BF16, Q8_0, Q5_0, Q4_0 or Q4_K; vectors are F32. If it has fewer than eight bits, the output layer (or
  /// the embeddings that it shares) is Q8_0. A matrix whose rows are not whole blocks of Q4_K is Q5_0, as in llama.cpp; a matrix whose rows
  /// are not whole blocks of its code is F32.
  std::string code = "F16";
  std::string name = {};  // general.name; the folder's name unless given
};

/// Writes a folder with config.json, tokenizer.json and weights as a file that llama.cpp and its relatives run. Takes the memory of one
/// tensor.
void write_gguf(const std::filesystem::path& folder, const std::filesystem::path& file, const GgufOptions& options = {});

/// Throws ConfigError, which names `model`, if a GGUF file can't hold a part of the model.
void expect_gguf_place(const models::LlamaConfig& config, const data::Tokenizer& tokenizer, const std::filesystem::path& model);

/// Whether write_description() can read the path: a GGUF file, or a folder with config.json.
bool has_description(const std::filesystem::path& model);
/// Returns the dtype of most values in a model's files as read_model() gives them: float32 where they are quantized.
at::ScalarType dtype_of_weights(const std::filesystem::path& model);
/// Writes the files of a folder besides the weights: config.json and the tokenizer's files, from a GGUF file or from another folder with
/// any model. `dtype` is the dtype of the weights in `folder`, if it differs from that of the model's files.
void write_description(const std::filesystem::path& model, const std::filesystem::path& folder, std::optional<at::ScalarType> dtype = {});
/// Writes a GGUF file as a folder with config.json, tokenizer.json and weights, which are decoded to float32 where they are quantized.
void write_hub(const std::filesystem::path& file, const std::filesystem::path& folder);

}  // namespace tessera::llm
