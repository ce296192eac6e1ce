// Cuts the text of a chat template into tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::llm::jinja {

struct Token {
  enum class Kind { Data, Sign, Name, Text, Integer, Real, End };  // Data: text outside of tags. Signs are also {{ and }}, {% and %}
  Kind kind = Kind::End;
  std::string text;
  int line = 1;
};

/// With trim_blocks and lstrip_blocks, as transformers sets them. Throws UsageError("line: ...").
std::vector<Token> tokens_of(std::string_view text);

[[noreturn]] void refuse_at(int line, std::string_view why);

}  // namespace tessera::llm::jinja
