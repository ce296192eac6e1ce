// TokenizerCore: the data of a tokenizer, and a cache of the tokens of words.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tessera/data/added_tokens.h"
#include "tessera/data/byte_pairs.h"
#include "tessera/data/pre_tokenizer.h"
#include "tessera/data/text_steps.h"
#include "tessera/data/tokenizer.h"
#include "tessera/data/unicode.h"
#include "tessera/data/unigram.h"

namespace tessera::data {

inline constexpr auto kChatTemplateFile = "chat_template.jinja";

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

/// All data of a tokenizer, which does not change once it is made.
struct TokenizerCore {
  TokenModel model = TokenModel::BytePairs;
  std::vector<std::string> tokens, bytes;  // by id: tokens as files write them, and the bytes of each; empty for unused ids
  TokenIds ids;
  std::vector<std::string> merges;
  std::vector<AddedToken> added;
  std::unordered_set<int32_t> special;
  AddedTokens before_form, in_form;  // tokens that are searched for in the text (before_form) and in its normal form (in_form)
  std::vector<TextStep> normalizer;
  std::optional<NormalForm> form;  // that of the normalizer, if it does nothing else
  std::optional<PreTokenizer> pre;
  std::optional<BytePairs> pairs;
  bool takes_whole = false;                  // whether a word that is a token becomes that token without merges (ignore_merges)
  TokenIds whole;                            // with takes_whole: all tokens by their bytes
  std::optional<int32_t> unknown;            // the unk_token
  std::vector<int32_t> first, last;          // the tokens with which texts begin and end
  std::map<std::string, std::string> named;  // tokens by the names that other programs use, such as eos_token
  std::map<std::string, std::string> files;  // contents of the other files of the tokenizer, by name
  // Of SentencePiece's kinds, which have no `bytes`:
  std::vector<double> scores;                // by id; of CharacterPairs, only if they come from a file of SentencePiece's or llama.cpp's
  std::optional<Unigram> unigram;
  std::vector<TokensStep> decoder;
  std::vector<int32_t> of_bytes;             // the pieces for bytes without another piece; empty if such bytes are unknown
  bool joins_unknown = false;                // whether a run of unknown characters is one token (fuse_unk)
  bool cuts_at_spaces = false;               // whether no piece reaches over the beginning of a run of spaces
  std::string steps = {};                    // the normalizer and all the rest of tokenizer.json, if that was not read
  PieceSpaces spaces = {};
  std::string unnamed = {};                  // a step that a GGUF file of SentencePiece's kinds can't say; empty if there is none
  uint64_t number = 0;                       // a number that no other tokenizer of the process has

  /// The memory of a thread for encoding.
  struct Scratch {
    PreTokenizer::Scratch pre;
    KnownWords words;
  };
  Scratch& scratch() const;

  /// The chat template in `files`; empty if there is none.
  std::string chat_template() const;

  void complete(const std::string& where);
  std::vector<BytePairs::Merge> learned_merges(const std::string& where) const;
  void set_bytes(const std::string& where);
  void set_pieces(const std::string& where);
  void set_byte_pieces();
  void read_beside(const std::filesystem::path& folder);
  /// Takes what SentencePiece's kinds need besides ids and added tokens.
  void take_pieces(const BpeVocabulary& vocabulary);
  void add_pieces_to(BpeVocabulary& vocabulary) const;
  std::vector<BytePairs::Merge> merges_of_scores() const;
  void expect_like(const KnownPreTokenizer& known) const;
  void expect_plain_added() const;
  std::string normalized(std::string_view text) const;
  void encode_plain(std::string_view text, Scratch& scratch, std::vector<int32_t>& to) const;
  void encode_piece(std::string_view piece, Scratch& scratch, std::vector<int32_t>& to) const;
  void encode_characters(std::string_view word, std::vector<int32_t>& to) const;
  void encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& to) const;
};

std::shared_ptr<TokenizerCore> core_of(const BpeVocabulary& vocabulary);

/// Throws ConfigError for a part that a GGUF file can't hold.
[[noreturn]] void refuse_place(const std::string& part);

/// How GPT-2 writes a byte: as itself if that can be printed, or as a letter from U+0100 on.
std::string letter_of(int byte);
/// The bytes of a token as files write it. If a letter of the token writes no byte, returns the token unchanged.
std::string bytes_of_token(const std::string& token);

}  // namespace tessera::data
