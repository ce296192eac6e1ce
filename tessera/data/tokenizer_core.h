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
#include "tessera/data/tokenizer.h"
#include "tessera/data/unicode.h"

namespace tessera::data {

inline constexpr auto kSentencePiece =
    "this is a tokenizer of SentencePiece, as Llama 2, Mistral 7B and Gemma have it; only byte-level BPE is read here: choose a model of "
    "that "
    "kind, such as Llama 3, Qwen, SmolLM or Mistral NeMo";
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

/// All data of a tokenizer, which does not change once it is made.
struct TokenizerCore {
  std::vector<std::string> tokens, bytes;  // by id: tokens as files write them, and the bytes of each; empty for unused ids
  TokenIds ids;
  std::vector<std::string> merges;
  std::vector<AddedToken> added;
  std::unordered_set<int32_t> special;
  AddedTokens before_form, in_form;  // tokens that are searched for in the text (before_form) and in its normal form (in_form)
  std::optional<NormalForm> form;
  std::optional<PreTokenizer> pre;
  std::optional<BytePairs> pairs;
  bool takes_whole = false;                  // whether a word that is a token becomes that token without merges (ignore_merges)
  TokenIds whole;                            // with takes_whole: all tokens by their bytes
  bool has_unknown = false;                  // whether there is an unk_token
  std::vector<int32_t> first, last;          // the tokens with which texts begin and end
  std::map<std::string, std::string> named;  // tokens by the names that other programs use, such as eos_token
  std::map<std::string, std::string> files;  // contents of the other files of the tokenizer, by name
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
  void expect_like(const KnownPreTokenizer& known) const;
  void encode_plain(std::string_view text, Scratch& scratch, std::vector<int32_t>& to) const;
  void encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& to) const;
};

/// How GPT-2 writes a byte: as itself if that can be printed, or as a letter from U+0100 on.
std::string letter_of(int byte);
/// The bytes of a token as files write it. If a letter of the token writes no byte, returns the token unchanged.
std::string bytes_of_token(const std::string& token);

}  // namespace tessera::data
