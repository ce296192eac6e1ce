// The shape of a BERT, as a Hugging Face folder describes it in config.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace tessera::models {

enum class BertActivation {
  Gelu,
  GeluTanh,  // the usual approximation of GELU
  Relu,
  Silu,
};

/// Members have the names of the keys in config.json, and the defaults of transformers: BERT base.
struct BertConfig {
  int64_t vocab_size = 30522;
  int64_t hidden_size = 768;
  int64_t num_hidden_layers = 12;
  int64_t num_attention_heads = 12;
  int64_t intermediate_size = 3072;
  int64_t max_position_embeddings = 512;  // tokens in the longest text
  int64_t type_vocab_size = 2;
  BertActivation hidden_act = BertActivation::Gelu;
  double hidden_dropout_prob = 0.1;
  double attention_probs_dropout_prob = 0.1;
  std::optional<double> classifier_dropout = {};  // hidden_dropout_prob unless given
  double layer_norm_eps = 1e-12;
  double initializer_range = 0.02;
  std::optional<int64_t> pad_token_id = 0;  // the word whose embedding is zero at first and gets no gradient
  int64_t num_labels = 2;

  /// Reads config.json of the folder. Throws IoError if the file can't be read or is damaged, and ConfigError if it describes a model
  /// that Tessera does not have, such as a decoder.
  static BertConfig read(const std::filesystem::path& folder);

  /// Writes config.json, which transformers reads, too.
  void write(const std::filesystem::path& folder) const;

  bool operator==(const BertConfig&) const = default;
};

/// Returns the configuration. Throws ConfigError, which names the key, for sizes and probabilities that no model can have.
const BertConfig& expect_sense(const BertConfig& config);

}  // namespace tessera::models
