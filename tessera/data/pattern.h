// A regular expression that cuts a text into words, as tokenizers of language models do.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// Returns the regular expression that matches exactly this text, for Pattern and for std::regex.
std::string escaped_pattern(std::string_view text);

/// Reads and matches as the library Oniguruma does, with the characters of Unicode that Hugging Face's tokenizers know. May be used by
/// several threads.
class Pattern {
 public:
  /// Throws ConfigError if `text` is not a regular expression, or has something that is not supported, such as backreferences.
  explicit Pattern(const std::string& text);
  /// The pattern that matches exactly this text.
  static Pattern of_text(const std::string& text);
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;

  const std::string& text() const { return text_; }

  struct Match {
    size_t begin = 0, end = 0;
  };
  /// An alternative to which a match can backtrack. A Scratch holds them for the matches of one thread, with any pattern.
  struct Turn {
    uint32_t step = 0;
    const char* at = nullptr;
    uint64_t left = 0;
  };
  using Scratch = std::vector<Turn>;
  /// Finds the first match that begins at `from` or after it; false if there is none. `text` is UTF-8. Throws Error for a text that takes
  /// too many tries.
  bool find(std::string_view text, size_t from, Scratch& scratch, Match& match) const;
  /// Calls `take` with each match. An empty match counts, too, unless it is where the previous match ended.
  void each_match(std::string_view text, Scratch& scratch, c10::function_ref<void(const Match&)> take) const;

 private:
  struct Program;
  std::string text_, literal_;  // literal_: what is matched by of_text()
  std::unique_ptr<const Program> program_;
};

}  // namespace tessera::data
