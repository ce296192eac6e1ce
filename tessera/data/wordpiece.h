// WordPiece: the tokenizer of BERT. It splits texts into words and words into the longest pieces that its vocabulary has.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/data/byte_pairs.h"

namespace tessera::data {

struct WordPieceOptions {
  bool lower_case = true;
  std::optional<bool> strip_accents = {};  // defaults to lower_case
  bool split_ideographs = true;            // each Chinese character is a word
};

/// Integer tensors of {texts, length}.
struct EncodedTexts {
  at::Tensor tokens;
  at::Tensor types;  // 0 in the first text of a pair, 1 in the second
  at::Tensor mask;   // 1 for tokens, 0 for padding
};

struct EncodeOptions {
  int64_t max_length = 512;  // in tokens; if a pair is longer, its longer text is cut at the end
  enum class Padding {
    ToLongest,    // to the longest of these texts
    ToMaxLength,  // to max_length, so that all batches have the same sizes
  } padding = Padding::ToLongest;
};

class WordPiece {
 public:
  /// The number of a token is its place in the vocabulary. Throws UsageError if the vocabulary lacks [PAD], [UNK], [CLS] or [SEP].
  explicit WordPiece(std::vector<std::string> vocabulary, const WordPieceOptions& options = {});

  /// Reads vocab.txt of a Hugging Face folder, and tokenizer_config.json if there is one. Throws IoError.
  static WordPiece read(const std::filesystem::path& folder);
  /// Makes a vocabulary for models that are trained from scratch: the special tokens, all characters of the texts, and their `max_words`
  /// most frequent words. Other texts with the same characters have no [UNK] either.
  static WordPiece of_words(std::span<const std::string> texts, int64_t max_words, const WordPieceOptions& options = {});
  /// Writes the files that read() reads.
  void write(const std::filesystem::path& folder) const;

  /// The number of tokens in the vocabulary.
  int64_t size() const { return static_cast<int64_t>(vocabulary_.size()); }

  /// The pieces of a text; a piece that does not begin a word begins with ##. Throws UsageError unless the text is UTF-8.
  std::vector<std::string> tokenize(std::string_view text) const;

  /// [CLS] text [SEP], followed by padding.
  EncodedTexts encode(std::span<const std::string> texts, const EncodeOptions& options = {}) const;
  /// [CLS] first [SEP] second [SEP], followed by padding.
  EncodedTexts encode(std::span<const std::pair<std::string, std::string>> pairs, const EncodeOptions& options = {}) const;

 private:
  using Numbers = std::vector<int64_t>;

  int64_t special(std::string_view token) const;
  std::vector<std::u32string> words_of(std::u32string text) const;
  void add_pieces(std::u32string_view word, std::vector<std::string>& tokens) const;
  Numbers numbers_of(std::string_view text) const;
  EncodedTexts encode(std::vector<std::pair<Numbers, std::optional<Numbers>>> texts, const EncodeOptions& options) const;

  std::vector<std::string> vocabulary_;
  ByText<int64_t> numbers_;
  WordPieceOptions options_;
  int64_t pad_ = 0, unknown_ = 0, begin_ = 0, separator_ = 0;
};

}  // namespace tessera::data
