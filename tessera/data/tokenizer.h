// Tokens of language models: byte-level BPE, as GPT-2, Llama 3 and Qwen have it, and SentencePiece's BPE and Unigram, as Llama 2, Mistral,
// Gemma and T5 have them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// How SentencePiece changes a text before it cuts it into pieces.
struct PieceSpaces {
  bool added = true;          // whether a text begins with a space
  bool merged = false;        // whether spaces at the ends are removed, and other runs of spaces become one space
  std::string charsmap = {};  // a table of replacements (precompiled_charsmap)
};

/// The vocabulary of a tokenizer, as a GGUF file stores it.
struct BpeVocabulary {
  std::vector<std::string> tokens;  // by id; of gpt2, their bytes written as GPT-2 writes them
  std::vector<std::string> merges;  // of gpt2: "a b", in the order in which they were learned
  std::vector<int32_t> added;       // ids of added tokens (see added_tokens.h)
  std::vector<int32_t> special;     // ids of those added tokens that decode() leaves out
  std::string pre;                  // of gpt2: the name of the pre-tokenizer: gpt2, llama3, qwen2, smollm, tekken
  std::optional<int32_t> bos = {};  // the token with which texts begin if add_bos
  bool add_bos = false;
  bool add_eos = false;  // whether texts end with eos
  std::optional<int32_t> eos = {}, pad = {}, unknown = {};  // passed on to other programs
  std::string chat_template = {};                           // in Jinja, passed on to other programs
  std::string model = "gpt2";                               // gpt2 (byte-level BPE), llama (SentencePiece's BPE) or t5 (Unigram)
  // Of llama and t5:
  std::vector<double> scores = {};  // by id
  PieceSpaces spaces = {};
  std::vector<int32_t> rstrip = {};  // ids of those added tokens that take the spaces behind them
};

/// Returns BpeVocabulary::add_bos for a GGUF file with this pre-tokenizer that does not set it, as llama.cpp does.
bool adds_bos(std::string_view pre);

/// Whether encode() adds the tokens with which texts begin and end, such as bos and eos.
enum class Ends { Bare, Added };

struct TokenizerCore;

/// May be used by several threads.
class Tokenizer {
 public:
  /// Reads tokenizer.json; `path` is the file or its folder. A text gets the same tokens as from Hugging Face's library. In a folder without
  /// this file, reads SentencePiece's tokenizer.model. Throws IoError if the file can't be read or is damaged, and ConfigError, which names
  /// the part, for a part that is not read here.
  static Tokenizer read(const std::filesystem::path& path);
  /// Throws ConfigError if the kind or the pre-tokenizer is unknown, or if a token of a merge, or a token with which texts begin or end, is
  /// missing.
  explicit Tokenizer(const BpeVocabulary& vocabulary);

  /// Bytes that are not UTF-8 count as U+FFFD.
  std::vector<int32_t> encode(std::string_view text, Ends ends = Ends::Added) const;
  void encode(std::string_view text, std::vector<int32_t>& tokens, Ends ends = Ends::Added) const;  // appends
  /// The text of tokens, with U+FFFD for bytes that are not UTF-8. Special::LeftOut leaves out special tokens. Throws UsageError for an
  /// unknown token.
  enum class Special { Shown, LeftOut };
  std::string decode(std::span<const int32_t> tokens, Special special = Special::LeftOut) const;

  /// One more than the largest id.
  int64_t size() const;
  std::optional<int32_t> find(std::string_view token) const;

  /// The vocabulary, for a GGUF file. Throws ConfigError for everything that such a file can't say: a pre-tokenizer without a name there, a
  /// normal form other than that of the pre-tokenizer with this name, flags of added tokens, texts that begin or end with several tokens,
  /// merges other than all that make a token.
  BpeVocabulary vocabulary() const;
  /// The text of tokenizer.json: everything on which the tokens of a text depend.
  std::string json() const;
  /// Writes tokenizer.json and tokenizer_config.json, as transformers reads them.
  void write(const std::filesystem::path& folder) const;

 private:
  explicit Tokenizer(std::shared_ptr<const TokenizerCore> core) : core_(std::move(core)) {}

  std::shared_ptr<const TokenizerCore> core_;
};

}  // namespace tessera::data
