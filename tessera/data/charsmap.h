// Charsmap: the table of replacements in a SentencePiece model (precompiled_charsmap), which makes a normal form of a text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::data {

class Charsmap {
 public:
  /// At each place, SentencePiece replaces the longest entry; Hugging Face's library replaces what a reader takes for one character.
  enum class Match { Longest, Graphemes };
  /// Throws ConfigError if the table is damaged.
  Charsmap(std::string table, Match match);
  std::string operator()(std::string_view text) const;

  const std::string& table() const { return table_; }

 private:
  uint32_t unit(uint32_t place) const;
  size_t replace(std::string_view text, std::string& result) const;

  std::string table_;  // the size of a double array (see Darts-clone), its units of four bytes, and texts that end with '\0'
  uint32_t size_ = 0;
  Match match_;
};

}  // namespace tessera::data
