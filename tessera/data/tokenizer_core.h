// TokenizerCore: the data of a tokenizer, and a cache of the tokens of words.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tessera/data/added_tokens.h"
#include "tessera/data/byte_pairs.h"
#include "tessera/data/pre_tokenizer.h"
#include "tessera/data/tokenizer.h"
#include "tessera/data/unigram.h"

namespace tessera::data {

inline constexpr auto kTokenizerFile = "tokenizer.json", kTokenizerConfig = "tokenizer_config.json",
                      kChatTemplateFile = "chat_template.jinja", kAddedTokensFile = "added_tokens.json";
/// The files of a model's folder besides config.json and the weights. A tokenizer copies them unchanged.
inline constexpr std::string_view kModelFiles[] = {kTokenizerFile,
                                                   kTokenizerConfig,
                                                   kChatTemplateFile,
                                                   kAddedTokensFile,
                                                   "special_tokens_map.json",
                                                   "vocab.json",
                                                   "merges.txt",
                                                   "vocab.txt",
                                                   "tokenizer.model",
                                                   "generation_config.json",
                                                   "preprocessor_config.json"};

/// Returns the texts of those of the files that a folder has, by name.
std::map<std::string, std::string> files_in(const std::filesystem::path& folder, std::span<const std::string_view> names = kModelFiles);

struct FoundTemplate {
  std::string text, file;
};
/// The chat template in such files, and the name of the file that has it; empty if there is none.
FoundTemplate chat_template_in(const std::map<std::string, std::string>& files);

/// A cache of the tokens of words. Of two words with the same hash it keeps the last one; long words are not cached. The system allocates
/// its memory as words are added.
class KnownWords {
 public:
  /// Appends the tokens of the word, and returns true, if the cache has it.
  bool find(std::string_view word, std::vector<int32_t>& tokens) const {
    const auto& known = places_.get()[place_of(word)];
    if (word != std::string_view(known.word, known.size)) return false;
    tokens.insert(tokens.end(), known.tokens, known.tokens + known.count);
    return true;
  }
  void add(std::string_view word, std::span<const int32_t> tokens) {
    auto& known = places_.get()[place_of(word)];
    if (word.size() > sizeof known.word || tokens.size() > std::size(known.tokens)) return;
    known.size = static_cast<uint8_t>(word.copy(known.word, sizeof known.word));
    known.count = static_cast<uint8_t>(tokens.size());
    std::ranges::copy(tokens, known.tokens);
  }

 private:
  static constexpr int kBits = 15;

  struct Place {
    char word[46];
    uint8_t size, count;
    int32_t tokens[20];
  };
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  static size_t place_of(std::string_view word) { return std::hash<std::string_view>{}(word) >> (64 - kBits); }

  static Place* allocated() {
    auto* const places = static_cast<Place*>(std::calloc(size_t{1} << kBits, sizeof(Place)));  // calloc() touches no page
    return places != nullptr ? places : throw std::bad_alloc();
  }

  std::unique_ptr<Place, Free> places_{allocated()};
};

/// How the tokens of a word are found: byte pair encoding of its bytes (GPT-2), of its characters (SentencePiece), or Unigram.
enum class TokenModel { BytePairs, CharacterPairs, Unigram };

/// Where Hugging Face's library and SentencePiece differ with the same data, whose tokens a text gets. SentencePiece looks for no control
/// tokens and bytes in texts, and all merges that make a token are equal.
enum class Rules { HuggingFace, SentencePiece };

// How normalizers name runs of spaces that are removed or become one.
inline constexpr auto kSpaces = " {2,}", kOuterSpaces = "\\A +|[ \u2581]+\\z", kWhite = "\\s+", kWhiteBegin = "\\A\\s+",
                      kWhiteEnd = "(?<!\\s)\\s+\\z";

/// All data of a tokenizer, which does not change once it is made.
struct TokenizerCore {
  TokenModel model = TokenModel::CharacterPairs;
  Rules rules = Rules::HuggingFace;
  std::vector<std::string> tokens, bytes;  // by id: tokens as files write them, and the text of each; empty for unused ids
  TokenIds ids;
  std::vector<std::string> merges;
  std::vector<double> scores;  // by id, of Unigram
  std::vector<AddedToken> added;
  std::unordered_set<int32_t> special;
  AddedTokens before_form, in_form;  // tokens that are searched for in the text (before_form) and in its normal form (in_form)
  PreTokenizer normalizer, pre;
  std::optional<BytePairs> pairs;
  std::optional<Unigram> unigram;
  bool takes_whole = false;                  // whether a word that is a token becomes that token without merges (ignore_merges)
  TokenIds whole;                            // with takes_whole: all tokens by their bytes
  std::optional<int32_t> unknown;            // the unk_token; -1 if that is missing in the vocabulary
  bool joins_unknown = false;                // whether a run of unknown characters is one token (fuse_unk)
  bool falls_back = false;                   // whether the bytes of unknown characters have tokens, such as <0xE4> (byte_fallback)
  bool joins_bytes = false;                  // whether decode() makes characters of such tokens
  bool strips_space = false;                 // whether decode() leaves out a space at the beginning
  std::vector<int32_t> first, last;          // the tokens with which texts begin and end
  std::map<std::string, std::string> files;  // contents of the files of the tokenizer, by name
  uint64_t number = 0;                       // a number that no other tokenizer of the process has

  /// The memory of a thread for encoding.
  struct Scratch {
    PreTokenizer::Scratch pre;
    KnownWords words;
  };
  Scratch& scratch() const;

  /// Builds the tables for encoding from tokens, merges and added tokens.
  void complete();
  void set_pieces();
  void set_bytes();
  std::vector<BytePairs::Merge> learned_merges() const;
  std::string normalized(std::string_view text, Scratch& scratch) const;
  void encode_plain(std::string_view text, Scratch& scratch, std::vector<int32_t>& to) const;
  void encode_characters(std::string_view word, std::vector<int32_t>& to) const;
  void encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& to) const;
};

/// Returns the tokenizer that tokenizer.json describes. Its errors begin with `where`. The tokenizer has `files`.
std::shared_ptr<const TokenizerCore> core_of(const std::string& where, const nlohmann::json& description, Rules rules,
                                             std::map<std::string, std::string> files);
/// The same with the description of a vocabulary.
std::shared_ptr<const TokenizerCore> core_of(const BpeVocabulary& vocabulary, const nlohmann::json& description,
                                             std::map<std::string, std::string> files);
/// Returns what tokenizer.json says of the vocabulary.
nlohmann::json description_of(const BpeVocabulary& vocabulary);

/// Returns the text of tokenizer_config.json with these keys besides those that it always has.
std::string config_with(nlohmann::json keys);

std::string to_base64(std::string_view bytes);

/// The text of a token of SentencePiece's kinds.
std::string with_spaces(std::string token);

/// How GPT-2 writes a byte: as itself if that can be printed, or as a letter from U+0100 on.
std::string letter_of(int byte);
/// The bytes of a token as files write it. If a letter of the token writes no byte, returns the token unchanged.
std::string bytes_of_token(const std::string& token);

}  // namespace tessera::data
