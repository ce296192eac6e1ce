// Reads tokenizer.model, the file of SentencePiece.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tessera/data/tokenizer.h"

namespace tessera::data {

inline constexpr auto kModelFile = "tokenizer.model";

/// `config` is tokenizer_config.json and `added` is added_tokens.json, which name tokens that the model lacks; null without such a file.
/// Throws IoError if the file is damaged, and ConfigError for a kind of model that is not read here.
BpeVocabulary read_sentence_piece(const std::filesystem::path& path, const nlohmann::json& config, const nlohmann::json& added);

}  // namespace tessera::data
