// Helpers that models and adapters in GGUF files share.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/data/tokenizer.h"
#include "tessera/models/llama_config.h"

namespace tessera::llm {

/// Returns general.architecture for a model.
std::string architecture_of(const models::LlamaConfig& config);
/// Returns general.architecture of a file. Throws ConfigError if models::Llama... does not have that architecture.
std::string known_architecture(const checkpoint::GgufFile& file);

models::LlamaConfig config_in_gguf(const std::filesystem::path& path);
void add_config(checkpoint::GgufMetadata& metadata, const models::LlamaConfig& config);
/// Returns the factors by which llama.cpp divides frequencies.
at::Tensor rope_factors(const models::LlamaConfig& config);

data::Tokenizer tokenizer_in_gguf(const std::filesystem::path& path);
void add_tokenizer(checkpoint::GgufMetadata& metadata, const data::Tokenizer& tokenizer, const models::LlamaConfig& config);
/// Whether llama.cpp lets the added tokens of a model with this name take the spaces behind them.
bool is_phi3(std::string_view name);

/// Returns the shortest decimal number that rounds to the same 32-bit value: 1e-5 instead of 9.99999975e-6.
inline double as_meant(double number) {
  return std::stod(fmt::format("{}", static_cast<float>(number)));
}

/// The value of general.name for the contents of a folder.
inline std::string name_of_folder(const std::filesystem::path& folder) {
  const auto path = std::filesystem::absolute(folder).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

inline checkpoint::GgufValue u32(int64_t value) {
  return {checkpoint::GgufType::U32, value};
}
inline checkpoint::GgufValue f32(double value) {
  return {checkpoint::GgufType::F32, static_cast<double>(static_cast<float>(value))};
}
inline checkpoint::GgufValue text(std::string value) {
  return {checkpoint::GgufType::Text, std::move(value)};
}

/// Returns the metadata that every file has: `type` is the type of the file's contents, and `file_type` the type of most of its tensors.
inline checkpoint::GgufMetadata general(const models::LlamaConfig& config, const char* type, std::string name, int64_t file_type) {
  return {{"general.architecture", text(architecture_of(config))},
          {"general.type", text(type)},
          {"general.name", text(std::move(name))},
          {"general.file_type", u32(file_type)},
          {"general.quantization_version", u32(2)}};
}

}  // namespace tessera::llm
