// Runs chat templates: the part of Jinja that they use, as transformers runs it.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::llm::jinja {

struct Range {
  size_t begin = 0, end = 0;  // bytes of a text
};

struct Rendered {
  std::string text;
  std::vector<Range> generated;           // by {% generation %}
  std::vector<std::vector<Range>> turns;  // for each of the messages: what loops wrote when they came to it
};

/// May be used by several threads.
class Template {
 public:
  /// Throws ConfigError, with the line, for a text that is not a template, or has a tag, filter or test that is unknown here.
  explicit Template(std::string_view text);

  /// `variables` is an object, whose "messages" is a list. Throws UsageError, with the template's line, where the template refuses the
  /// messages or fails.
  Rendered render(const nlohmann::ordered_json& variables) const;

 private:
  struct Program;
  std::shared_ptr<const Program> program_;
};

}  // namespace tessera::llm::jinja
