// PreTokenizer: cuts a text into the words that byte pair encoding works on.
#pragma once

#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/pattern.h"
#include "tessera/data/unicode.h"

namespace tessera::data {

/// One step after the other, each of which cuts the pieces of the step before.
class PreTokenizer {
 public:
  /// Whether a match of the pattern is a piece or is removed. The text between matches always is a piece.
  enum class Behavior { Isolated, Removed };
  struct Step {
    Pattern pattern;
    Behavior behavior = Behavior::Isolated;
    bool adds_space = false;  // before a piece that begins with none
  };

  explicit PreTokenizer(std::vector<Step> steps) : steps_(std::move(steps)) {}

  using Scratch = Pattern::Scratch;
  void each_word(std::string_view text, Scratch& scratch, c10::function_ref<void(std::string_view)> take) const {
    cut(0, text, scratch, take);
  }

  const std::vector<Step>& steps() const { return steps_; }

 private:
  void cut(size_t step, std::string_view text, Scratch& scratch, c10::function_ref<void(std::string_view)> take) const;

  std::vector<Step> steps_;
};

/// The patterns of GPT-2 and of those who came after it, by the names that GGUF files have for them.
struct KnownPreTokenizer {
  std::string_view name, other_name = {};
  std::vector<std::string> patterns;
  std::optional<NormalForm> form = {};  // of texts
  bool takes_whole = false;             // whether texts begin with bos, and a word that is a token is not merged
};
/// Return nullptr for one that is none of these.
const KnownPreTokenizer* find_pre_tokenizer(std::string_view name);
const KnownPreTokenizer* find_pre_tokenizer(const PreTokenizer& pre);
/// "gpt2, llama3, ..."
std::string names_of_pre_tokenizers();

/// GPT-2's, which is in all tokenizers of the kind ByteLevel.
extern const char* const kGpt2Pattern;
extern const char* const kDigitPattern;   // matches each digit by itself
extern const char* const kDigitsPattern;  // matches all that follow one another

}  // namespace tessera::data
