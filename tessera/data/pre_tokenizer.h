// PreTokenizer: changes a text and cuts it into the words that the model of a tokenizer works on.
#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/charsmap.h"
#include "tessera/data/pattern.h"
#include "tessera/data/unicode.h"

namespace tessera::data {

/// Applies steps in order: each one changes or cuts the pieces of the previous step.
class PreTokenizer {
 public:
  /// Whether a match of the pattern is a piece, is removed, begins or ends a piece, or is replaced by Step::by without a cut. The text
  /// between matches always is a piece.
  enum class Behavior { Isolated, Removed, BeginsPiece, EndsPiece, Replaced };
  /// Before which texts Step::by is put: none, all, those that do not begin with it, or of these only the one with which the text begins.
  enum class Prefix { Never, Always, IfMissing, IfMissingFirst };
  /// A step applies those of the normal form, the table, the prefix and the pattern that are set, in this order.
  struct Step {
    std::optional<Pattern> pattern = {};
    Behavior behavior = Behavior::Isolated;
    Prefix prefix = Prefix::Never;
    std::string by = {};
    std::optional<NormalForm> form = {};
    std::shared_ptr<const Charsmap> charsmap = {};
  };

  explicit PreTokenizer(std::vector<Step> steps = {}) : steps_(std::move(steps)) {}

  using Scratch = Pattern::Scratch;
  /// Whether `text` is the beginning of the whole text.
  enum class Place { Begin, Inside };
  void each_word(std::string_view text, Place place, Scratch& scratch, c10::function_ref<void(std::string_view)> take) const {
    cut(0, text, place, scratch, take);
  }

  const std::vector<Step>& steps() const { return steps_; }
  void add(Step step) { steps_.push_back(std::move(step)); }

 private:
  void cut(size_t step, std::string_view text, Place place, Scratch& scratch, c10::function_ref<void(std::string_view)> take) const;

  std::vector<Step> steps_;
};

/// The patterns of GPT-2 and of later models, by the names that GGUF files use.
struct KnownPreTokenizer {
  std::string_view name, other_name = {};
  std::vector<std::string> patterns;
  std::optional<NormalForm> form = {};  // the form to which texts are normalized
  bool takes_whole = false;             // whether texts begin with bos, and a word that is a token is taken as that token, without merges
};
/// Return nullptr for an unknown pre-tokenizer.
const KnownPreTokenizer* find_pre_tokenizer(std::string_view name);
const KnownPreTokenizer* find_pre_tokenizer(const PreTokenizer& pre);
/// "gpt2, llama3, ..."
std::string names_of_pre_tokenizers();

/// The pattern of GPT-2, which all tokenizers of the type ByteLevel use.
extern const char* const kGpt2Pattern;
extern const char* const kDigitPattern;   // matches each digit by itself
extern const char* const kDigitsPattern;  // matches a run of digits

}  // namespace tessera::data
