// What a tokenizer is made of.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
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
    "this is a tokenizer of SentencePiece, as Llama 2, Mistral 7B and Gemma have it; only byte-level BPE is read here: choose a model of that "
    "kind, such as Llama 3, Qwen, SmolLM or Mistral NeMo";
inline constexpr auto kChatTemplateFile = "chat_template.jinja";

/// All of it, unchanged once it is made.
struct TokenizerCore {
  std::vector<std::string> tokens, bytes;  // by id: as they are written, and what they stand for; empty where there is none
  TokenIds ids;
  std::vector<std::string> merges;
  std::vector<AddedToken> added;
  std::unordered_set<int32_t> special;
  AddedTokens before_form, in_form;  // looked for in the text, and in its normal form
  std::optional<NormalForm> form;
  std::optional<PreTokenizer> pre;
  std::optional<BytePairs> pairs;
  bool takes_whole = false;                  // whether a word that is a token is not merged, but taken as a whole:
  TokenIds whole;                            // those words
  bool has_unknown = false;                  // whether there is a token for what has none
  std::vector<int32_t> first, last;          // with which texts begin and end
  std::map<std::string, std::string> named;  // tokens that other programs ask for: eos_token
  std::map<std::string, std::string> files;  // as they were read, by name
  uint64_t number = 0;                       // of this one in the process

  /// What a thread needs for it.
  struct Scratch {
    PreTokenizer::Scratch pre;
    std::unordered_map<std::string, std::vector<int32_t>, TextHash, std::equal_to<>> words;
  };
  Scratch& scratch() const;

  /// What `files` say of it; empty if they don't.
  std::string chat_template() const;

  void complete(const std::string& where);
  void expect_named(std::string_view pre_name) const;
  void encode_plain(std::string_view text, Scratch& scratch, std::vector<int32_t>& to) const;
  void encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& to) const;
};

/// How GPT-2 writes a byte: as itself if that can be printed, or as a letter from U+0100 on.
std::string letter_of(int byte);
/// What a token that is written so stands for. One with a letter that is no byte stands for itself.
std::string bytes_of_token(const std::string& token);

}  // namespace tessera::data
