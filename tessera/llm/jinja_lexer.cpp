#include "tessera/llm/jinja_lexer.h"

#include <algorithm>
#include <cctype>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/unicode.h"
#include "tessera/llm/jinja_values.h"

namespace tessera::llm::jinja {
namespace {

using Kind = Token::Kind;

constexpr std::string_view kSigns[] = {"==", "!=", ">=", "<=", "//", "+", "-", "*", "/", "%", "~", "(", ")",
                                       "[",  "]",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};

struct Lexer {
  std::string text;  // lines end with \n only
  size_t at = 0, counted = 0;
  int line = 1;
  std::vector<Token> tokens = {};

  bool here(std::string_view what) const { return text.compare(at, what.size(), what) == 0; }
  char now() const { return at < text.size() ? text[at] : '\0'; }
  int line_here() {
    line += static_cast<int>(std::count(text.begin() + std::ptrdiff_t(counted), text.begin() + std::ptrdiff_t(at), '\n'));
    counted = at;
    return line;
  }
  void add(Kind kind, std::string what) { tokens.push_back({kind, std::move(what), line_here()}); }
  void skip_blanks() { at = text.size() - stripped(std::string_view(text).substr(at), Sides::Left).size(); }

  void lex() {
    for (bool new_line = true; at < text.size();) {
      auto begin = at;
      do begin = text.find('{', begin);
      while (begin != std::string::npos && begin++ + 1 < text.size() && std::string_view("{%#").find(text[begin]) == std::string::npos);
      begin = begin >= text.size() ? text.size() : begin - 1;
      auto data = std::string_view(text).substr(at, begin - at);
      const auto tag = text.substr(begin, 2);
      const char sign = begin + 2 < text.size() ? text[begin + 2] : '\0';
      if (sign == '-') {
        data = stripped(data, Sides::Right);
      } else if (sign != '+' && begin < text.size() && tag != "{{") {
        const auto last = data.rfind('\n') + 1;
        if ((last > 0 || new_line) && stripped(data.substr(last), Sides::Right).empty()) data = data.substr(0, last);
      }
      if (!data.empty()) add(Kind::Data, std::string(data));
      at = begin;
      if (begin == text.size()) break;
      at += 2;
      if (sign == '-' || sign == '+') at++;
      tag == "{#" ? lex_comment() : lex_tag(tag);
      new_line = text[at - 1] == '\n';
    }
    add(Kind::End, "the end of the template");
  }

  /// Goes over the end of a tag and the blanks that belong to it.
  void leave(char sign, std::string_view tag) {
    if (sign == '-') return skip_blanks();
    if (sign != '+' && tag != "{{" && now() == '\n') at++;
  }

  void lex_comment() {
    const auto end = text.find("#}", at);
    if (end == std::string::npos) refuse_at(line_here(), "a comment has no end");
    const char sign = end > at ? text[end - 1] : '\0';
    at = end + 2;
    leave(sign, "{#");
  }

  void lex_tag(const std::string& tag) {
    const std::string_view end = tag == "{{" ? "}}" : "%}";
    add(Kind::Sign, tag);
    for (int depth = 0;;) {
      skip_blanks();
      const char sign = now();
      const bool signed_end = (sign == '-' || (sign == '+' && tag == "{%")) && text.compare(at + 1, 2, end) == 0;
      if (depth == 0 && (signed_end || here(end))) {
        add(Kind::Sign, std::string(end));
        at += signed_end ? 3 : 2;
        return leave(sign, tag);
      }
      if (at >= text.size()) refuse_at(line_here(), "a tag has no end");
      if (sign == '"' || sign == '\'') {
        lex_text();
      } else if (std::isdigit(static_cast<unsigned char>(sign)) != 0) {
        lex_number();
      } else if (std::isalpha(static_cast<unsigned char>(sign)) != 0 || sign == '_') {
        const auto begin = at;
        while (std::isalnum(static_cast<unsigned char>(now())) != 0 || now() == '_') at++;
        add(Kind::Name, text.substr(begin, at - begin));
      } else {
        const auto found = std::ranges::find_if(kSigns, [&](std::string_view known) { return here(known); });
        if (found == std::end(kSigns)) refuse_at(line_here(), "it has '" + printable(std::string(1, sign)) + "' in a tag");
        if (std::string_view("([{").find(sign) != std::string::npos) depth++;
        if (std::string_view(")]}").find(sign) != std::string::npos) depth--;
        add(Kind::Sign, std::string(*found));
        at += found->size();
      }
    }
  }

  void lex_number() {
    const auto begin = at;
    const auto digits = [&] { while (std::isdigit(static_cast<unsigned char>(now())) != 0) at++; };
    digits();
    const bool real = now() == '.' && at + 1 < text.size() && std::isdigit(static_cast<unsigned char>(text[at + 1])) != 0;
    if (real) at++, digits();
    add(real ? Kind::Real : Kind::Integer, text.substr(begin, at - begin));
  }

  void lex_text() {
    const char quote = text[at++];
    std::string out;
    for (; now() != quote; at++) {
      if (at >= text.size()) refuse_at(line_here(), "a text has no end");
      if (now() != '\\') {
        out += now();
        continue;
      }
      at++;
      constexpr std::string_view codes = "ntrbfva\\'\"", characters = "\n\t\r\b\f\v\a\\'\"", wide = "xuU";
      if (const auto code = codes.find(now()); code != std::string::npos) {
        out += characters[code];
      } else if (const auto kind = wide.find(now()); kind != std::string::npos) {
        const size_t digits = 2U << kind;
        const auto value = static_cast<char32_t>(std::strtoul(text.substr(at + 1, digits).c_str(), nullptr, 16));
        out += data::to_utf8({&value, 1});
        at += digits;
      } else if (now() != '\n') {
        out += {'\\', now()};
      }
    }
    add(Kind::Text, out);
    at++;
  }
};

}  // namespace

void refuse_at(int line, std::string_view why) {
  throw ConfigError("the chat template, line {}: {}", line, why);
}

std::vector<Token> tokens_of(std::string_view text) {
  Lexer lexer{.text = {}};
  for (size_t i = 0; i < text.size(); i++) {
    if (text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n') continue;
    lexer.text += text[i] == '\r' ? '\n' : text[i];
  }
  if (lexer.text.ends_with('\n')) lexer.text.pop_back();
  if (data::invalid_utf8(lexer.text)) throw ConfigError("the chat template is not UTF-8");
  lexer.lex();
  return std::move(lexer.tokens);
}

}  // namespace tessera::llm::jinja
