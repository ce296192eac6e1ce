// Steps that change a text before it is cut into tokens, and that make a text of tokens, as SentencePiece's tokenizers need them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/pattern.h"
#include "tessera/data/unicode.h"

namespace tessera::data {

using TextStep = std::function<void(std::string& text)>;
using TokensStep = std::function<void(std::vector<std::string>& tokens)>;  // of a decoder

TextStep normalizing(NormalForm form);
TextStep prepending(std::string text);
/// Replaces each match of the pattern; `literal` is the text that the pattern matches if it matches only one.
TextStep replacing(std::shared_ptr<const Pattern> pattern, std::string literal, std::string by);
TextStep stripping(bool left, bool right);
TextStep changing_characters(std::function<void(std::u32string&)> change);

/// The table of replacements in a SentencePiece model (precompiled_charsmap).
class Charsmap {
 public:
  /// At each place, SentencePiece replaces the longest entry; Hugging Face's library replaces what a reader takes for one character.
  enum class Match { Longest, Graphemes };
  /// Throws ConfigError if the table is damaged.
  Charsmap(std::string_view table, Match match);
  void operator()(std::string& text) const;

 private:
  struct Found {
    size_t length = 0;  // of the entry; 0 if there is none
    std::string_view text;
  };
  Found find(std::string_view text, Match match) const;

  std::vector<uint32_t> units_;  // a double array, see Darts-clone
  std::string texts_;
  Match match_;
};

/// Makes characters of runs of tokens such as <0xE4>.
void join_bytes(std::vector<std::string>& tokens);

}  // namespace tessera::data
