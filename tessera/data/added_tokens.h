// Tokens that stand for a text as a whole, such as <|im_end|>: they are looked for before a text is cut into words.
#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;                 // left out of texts for people
  bool lstrip = false, rstrip = false;  // whether it takes the spaces before it, and behind it
  bool single_word = false;             // not within a word
  bool normalized = false;              // looked for in the text that is normalized already
};

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  /// Cuts the text: `take` gets the tokens with their ids, and the text between tokens with -1. Of several tokens at one place the longest
  /// counts.
  void cut(std::string_view text, c10::function_ref<void(std::string_view piece, int32_t id)> take) const;

 private:
  bool may_begin_with(char byte) const { return !by_first_byte_[static_cast<uint8_t>(byte)].empty(); }
  const AddedToken* longest_at(std::string_view text) const;

  std::array<std::vector<AddedToken>, 256> by_first_byte_;  // the longest first
  bool any_ = false;
};

}  // namespace tessera::data
