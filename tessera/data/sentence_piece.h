// Reads tokenizer.model, the file of SentencePiece.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tessera/data/tokenizer.h"

namespace tessera::data {

inline constexpr auto kModelFile = "tokenizer.model";

/// `config` is tokenizer_config.json. Throws IoError if the file is damaged, and ConfigError for a model of another kind.
BpeVocabulary read_sentence_piece(const std::filesystem::path& path, const nlohmann::json& config);

}  // namespace tessera::data
