#include "tessera/data/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include "tessera/base/error.h"

namespace tessera::data {
namespace {

constexpr std::string_view kSpaces = R"(\t-\r\x{85}\p{Z})";  // PCRE2's own \s has U+180E, too

/// The expression with \s and \S spelled out.
std::string with_spaces(const std::string& text) {
  std::string result;
  bool in_class = false;
  for (size_t i = 0; i < text.size(); i++) {
    if (text[i] == '\\' && i + 1 < text.size()) {
      const char next = text[++i];
      if (next == 's') {
        result += in_class ? std::string(kSpaces) : fmt::format("[{}]", kSpaces);
      } else if (next == 'S' && !in_class) {
        result += fmt::format("[^{}]", kSpaces);
      } else {
        result += {'\\', next};
      }
      continue;
    }
    if (text[i] == '[' && !in_class) {
      in_class = true;
    } else if (text[i] == ']') {
      in_class = false;
    }
    result += text[i];
  }
  return result;
}

std::string message_of(int number) {
  unsigned char text[256] = {};
  pcre2_get_error_message(number, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

}  // namespace

struct Pattern::Code {
  pcre2_code* code = nullptr;
  bool is_compiled = false;  // to machine code
  ~Code() { pcre2_code_free(code); }
};

struct Pattern::Scratch::Data {
  pcre2_match_data* match = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;
  ~Data() {
    pcre2_match_data_free(match);
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
  }
};

Pattern::Pattern(const std::string& text) : text_(text), code_(std::make_unique<Code>()) {
  const auto spelled = with_spaces(text);
  int failure = 0;
  PCRE2_SIZE place = 0;
  code_->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(spelled.data()), spelled.size(), PCRE2_UTF | PCRE2_UCP, &failure, &place, nullptr);
  if (code_->code == nullptr) throw ConfigError(fmt::format("'{}' is no regular expression: {}", text, message_of(failure)));
  code_->is_compiled = pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE) == 0;
}

Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern& Pattern::operator=(Pattern&&) noexcept = default;

Pattern::Scratch::Scratch(const Pattern& pattern) : data_(std::make_unique<Data>()) {
  constexpr size_t kLeast = 32 << 10, kMost = 64 << 20;  // a word may be as long as the text
  data_->match = pcre2_match_data_create_from_pattern(pattern.code_->code, nullptr);
  data_->context = pcre2_match_context_create(nullptr);
  data_->stack = pcre2_jit_stack_create(kLeast, kMost, nullptr);
  pcre2_jit_stack_assign(data_->context, nullptr, data_->stack);
}

Pattern::Scratch::~Scratch() = default;
Pattern::Scratch::Scratch(Scratch&&) noexcept = default;

bool Pattern::find(std::string_view text, size_t from, Scratch& scratch, Match& match) const {
  const auto& data = *scratch.data_;
  const auto* bytes = reinterpret_cast<PCRE2_SPTR>(text.data());
  const int found = code_->is_compiled ? pcre2_jit_match(code_->code, bytes, text.size(), from, 0, data.match, data.context)
                                       : pcre2_match(code_->code, bytes, text.size(), from, PCRE2_NO_UTF_CHECK, data.match, data.context);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  if (found < 0) throw Error(fmt::format("'{}' can't be matched: {}", text_, message_of(found)));
  const auto* places = pcre2_get_ovector_pointer(data.match);
  match = {places[0], places[1]};
  return true;
}

}  // namespace tessera::data
