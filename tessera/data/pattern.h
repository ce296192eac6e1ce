// A regular expression that cuts a text into words, as tokenizers of language models do, by the library PCRE2.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace tessera::data {

/// May be used by several threads. What \s means is what it does for the tokenizers of Hugging Face.
class Pattern {
 public:
  /// Throws ConfigError if it is none.
  explicit Pattern(const std::string& text);
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;

  const std::string& text() const { return text_; }

  struct Match {
    size_t begin = 0, end = 0;
  };
  /// Room for the matches of one thread.
  class Scratch {
   public:
    explicit Scratch(const Pattern& pattern);
    ~Scratch();
    Scratch(Scratch&&) noexcept;

   private:
    friend class Pattern;
    struct Data;
    std::unique_ptr<Data> data_;
  };
  /// The first match that begins at `from` or behind it. False if there is none. `text` is UTF-8.
  bool find(std::string_view text, size_t from, Scratch& scratch, Match& match) const;

 private:
  struct Code;
  std::string text_;
  std::unique_ptr<Code> code_;
};

}  // namespace tessera::data
