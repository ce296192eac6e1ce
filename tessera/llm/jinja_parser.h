// Parses chat templates.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/llm/jinja_values.h"

namespace tessera::llm::jinja {

/// An expression, or a statement: tags, texts, and the body of a tag.
struct Node {
  std::string op, text = {};  // `text` is a name, or a text of the template
  std::vector<Node> kids = {};
  int line = 0;
  Value value = nullptr;  // of a constant
};

/// With trim_blocks and lstrip_blocks, as transformers sets them. Throws ConfigError with the line.
Node parsed(std::string_view text);

}  // namespace tessera::llm::jinja
