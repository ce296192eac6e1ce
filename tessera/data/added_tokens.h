// Added tokens, such as <|im_end|>: a tokenizer finds them in a text before it cuts the rest into words.
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
  bool special = false;                 // whether decode() can leave the token out
  bool lstrip = false, rstrip = false;  // whether the token includes the spaces before it (lstrip) and after it (rstrip)
  bool single_word = false;             // whether the token is found only where it is a whole word
  bool normalized = false;              // whether the token is searched for in the normalized text
};

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  /// Calls `take` with each token in the text and its id, and with each piece between tokens and -1. If several tokens begin at one place,
  /// the longest is taken.
  void cut(std::string_view text, c10::function_ref<void(std::string_view piece, int32_t id)> take) const;

 private:
  bool may_begin_with(char byte) const { return !by_first_byte_[static_cast<uint8_t>(byte)].empty(); }
  const AddedToken* longest_at(std::string_view text) const;

  std::array<std::vector<AddedToken>, 256> by_first_byte_;  // the tokens that begin with each byte, the longest first
  bool any_ = false;
};

}  // namespace tessera::data
