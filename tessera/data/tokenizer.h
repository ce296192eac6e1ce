// Tokens of language models: byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it.
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

/// The tokens of a tokenizer and their merges, as a GGUF file has them.
struct BpeVocabulary {
  std::vector<std::string> tokens;  // by id, their bytes written as GPT-2 writes them
  std::vector<std::string> merges;  // "a b", in the order in which they were learned
  std::vector<int32_t> added;       // ids of tokens that stand for a text as a whole,
  std::vector<int32_t> special;     // and of those among them that are left out of texts for people
  std::string pre;                  // the name of the pre-tokenizer: gpt2, llama3, qwen2, smollm, tekken
  std::optional<int32_t> bos = {};  // the token with which texts begin if add_bos
  bool add_bos = false;
  bool add_eos = false;  // whether they end with eos
  std::optional<int32_t> eos = {}, pad = {}, unknown = {};  // for other programs, as is
  std::string chat_template = {};                           // of Jinja, for other programs
};

/// Whether texts begin with bos if a GGUF file with this pre-tokenizer does not tell, as llama.cpp has it.
bool adds_bos(std::string_view pre);

/// Whether the tokens with which a text begins or ends for the model are added.
enum class Ends { Bare, Added };

struct TokenizerCore;

/// May be used by several threads.
class Tokenizer {
 public:
  /// Reads tokenizer.json, of a folder or by its own name. The same text has the tokens that Hugging Face's library makes of it. Throws
  /// IoError if the file can't be read or is damaged, and ConfigError, which names it, for a part that does not belong to byte-level BPE.
  static Tokenizer read(const std::filesystem::path& path);
  /// Throws ConfigError for an unknown name of a pre-tokenizer, and if tokens of merges or of the ends of texts are missing.
  explicit Tokenizer(const BpeVocabulary& vocabulary);

  /// Bytes that are not UTF-8 count as U+FFFD.
  std::vector<int32_t> encode(std::string_view text, Ends ends = Ends::Added) const;
  void encode(std::string_view text, std::vector<int32_t>& tokens, Ends ends = Ends::Added) const;  // appends
  /// The text of tokens, with U+FFFD for bytes that are no UTF-8. Special tokens are left out if that is asked for. Throws UsageError for a
  /// token that is not there.
  enum class Special { Shown, LeftOut };
  std::string decode(std::span<const int32_t> tokens, Special special = Special::LeftOut) const;

  /// One more than the largest id.
  int64_t size() const;
  std::optional<int32_t> find(std::string_view token) const;

  /// The vocabulary, for a GGUF file. Throws ConfigError if the pre-tokenizer is not one of those with a name, and for everything that the
  /// name does not tell: another normal form, flags of added tokens, several tokens at an end.
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
