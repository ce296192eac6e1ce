#include "tessera/llm/jinja_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/unicode.h"

namespace tessera::llm::jinja {
namespace {

constexpr int kDeepest = 200;  // tags and brackets in each other

bool is_letter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}
bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

class Parser {
 public:
  explicit Parser(std::string text) : text_(std::move(text)) {}

  /// Parses up to a tag with one of these names, and goes over the name.
  Node body(std::string_view ends) {
    Node all{.op = "body", .line = line()};
    if (++depth_ > kDeepest) refuse("it has too many tags or brackets in each other");
    while (data(all)) {
      const auto begin = line();
      if (kind_ == '{') {
        all.kids.push_back({"out", "", {tuple()}, begin});
      } else {
        const auto tag = word();
        if (is_listed(ends, end_ = tag)) return depth_--, all;
        all.kids.push_back(statement(tag));
        all.kids.back().line = begin;
      }
      close(kind_ == '{' ? "}}" : "%}");
    }
    if (!ends.empty()) refuse_at(all.line, fmt::format("a tag has no '{}'", stripped(ends.substr(ends.rfind(" e")), Sides::Both)));
    return all;
  }

 private:
  int line() const {
    return 1 + static_cast<int>(std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(std::min(at_, text_.size())), '\n'));
  }
  [[noreturn]] static void refuse_at(int line, std::string_view why) { throw ConfigError("the chat template, line {}: {}", line, why); }
  [[noreturn]] void refuse(std::string_view why) const { refuse_at(line(), why); }
  [[noreturn]] void refuse_here(std::string_view wanted) const {
    refuse(fmt::format("there is '{}' in place of {}", printable(text_.substr(at_, 8)), wanted));
  }

  // Texts and the borders of tags

  char now(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  bool is(std::string_view what, size_t ahead = 0) const {
    return text_.compare(std::min(at_ + ahead, text_.size()), what.size(), what) == 0;
  }
  void skip_blanks() { at_ = text_.size() - stripped(std::string_view(text_).substr(at_), Sides::Left).size(); }

  /// Appends the text up to the next tag, and goes over its beginning. False at the end of the template.
  bool data(Node& all) {
    for (;;) {
      auto begin = at_;
      while ((begin = text_.find('{', begin)) < text_.size() && !is_listed(" { % # ", text_.substr(begin + 1, 1))) begin++;
      begin = std::min(begin, text_.size());
      kind_ = begin < text_.size() ? text_[begin + 1] : '\0';
      const char sign = begin + 2 < text_.size() ? text_[begin + 2] : '\0';
      auto text = std::string_view(text_).substr(at_, begin - at_);
      const auto last = text.rfind('\n') + 1;
      if (sign == '-') {
        text = stripped(text, Sides::Right);
      } else if (sign != '+' && (kind_ == '%' || kind_ == '#') && (last > 0 || new_line_) &&
                 stripped(text.substr(last), Sides::Left).empty()) {
        text = text.substr(0, last);
      }
      if (!text.empty()) all.kids.push_back({"text", std::string(text)});
      at_ = begin + (kind_ == '\0' ? 0 : sign == '-' || sign == '+' ? 3 : 2);
      if (kind_ != '#') return kind_ != '\0';
      at_ = text_.find("#}", at_);
      if (at_ == std::string::npos) refuse("a comment has no end");
      at_--;
      if (now() != '-' && now() != '+') at_++;
      close("#}");
    }
  }

  /// Goes over the end of a tag, and the blanks that belong to it.
  void close(std::string_view end) {
    if (end != "#}") skip_blanks();
    const char sign = is(end) ? '\0' : now();
    if (sign != '\0' && !((sign == '-' || (sign == '+' && end != "}}")) && is(end, 1))) refuse_here(fmt::format("'{}'", end));
    if (at_ >= text_.size()) refuse("a tag has no end");
    at_ += sign == '\0' ? 2 : 3;
    if (sign == '-') skip_blanks();
    if (sign == '\0' && end != "}}" && now() == '\n') at_++;
    new_line_ = text_[at_ - 1] == '\n';
  }

  // Words and signs in tags

  bool skip(std::string_view what) {
    skip_blanks();
    if (!is(what) || (is_letter(what.back()) && is_letter(now(what.size())))) return false;
    if ((what == "-" || what == "+" || what == "%") && (is("}", 1) || is("%}", 1))) return false;  // the end of a tag
    if (what == "=" && is("=", 1)) return false;
    at_ += what.size();
    return true;
  }
  void expect(std::string_view what) {
    if (!skip(what)) refuse_here(fmt::format("'{}'", what));
  }
  std::string word() {
    skip_blanks();
    const auto begin = at_;
    while (is_letter(now())) at_++;
    if (begin == at_ || is_digit(text_[begin])) refuse_here("a name");
    return text_.substr(begin, at_ - begin);
  }
  std::string peek() {
    skip_blanks();
    size_t size = 0;
    while (is_letter(now(size))) size++;
    return text_.substr(at_, size);
  }

  // Statements

  Node block(std::string_view ends) {
    close("%}");
    return body(ends);
  }

  Node statement(const std::string& tag) {
    if (tag == "if") {
      Node all{"choose", "", {expression()}};
      all.kids.push_back(block(" elif else endif "));
      if (end_ == "elif") all.kids.push_back(statement("if"));
      if (end_ == "else") all.kids.push_back(block(" endif "));
      return all;
    }
    if (tag == "for") {
      Node all{"for", "", {target()}};
      expect("in");
      all.kids.push_back(binary(0));
      auto wanted = skip("if") ? expression() : Node{"const", "", {}, 0, true};
      all.kids.push_back(std::move(wanted));
      all.kids.push_back(block(" else endfor "));
      all.kids.push_back(end_ == "else" ? block(" endfor ") : Node{"body"});
      return all;
    }
    if (tag == "set") {
      auto names = target();
      if (skip("=")) return {"set", "", {std::move(names), tuple()}};
      return {"set", "", {std::move(names), {"written", "", {block(" endset ")}}}};
    }
    if (tag == "macro") {
      Node all{"macro", word()};
      expect("(");
      while (!skip(")")) {
        all.kids.push_back({"parameter", word()});
        if (skip("=")) all.kids.back().kids.push_back(expression());
        if (!is(")")) expect(",");
      }
      all.kids.push_back(block(" endmacro "));
      return all;
    }
    if (tag == "generation") return {"generation", "", {block(" endgeneration ")}};
    if (tag == "break" || tag == "continue") return {tag};
    refuse(fmt::format("the tag '{}' is not supported", tag));
  }

  /// Names that get values: a, b or space.member.
  Node target() {
    const bool bracket = skip("(");
    Node all{"target", "", {{"name", word()}}};
    if (skip(".")) return {"member", word(), {std::move(all.kids.front())}};
    while (skip(",")) all.kids.push_back({"name", word()});
    if (bracket) expect(")");
    return all;
  }

  // Expressions

  Node deeper(const auto& parse) {
    if (++depth_ > kDeepest) refuse("it has too many tags or brackets in each other");
    auto node = parse();
    depth_--;
    return node;
  }

  Node expression() {
    return deeper([&] {
      auto value = binary(0);
      while (skip("if")) {
        auto condition = binary(0);
        value = {"choose", "", {std::move(condition), std::move(value)}};
        if (skip("else")) value.kids.push_back(expression());
      }
      return value;
    });
  }

  Node tuple() {
    auto first = expression();
    if (!skip(",")) return first;
    Node all{"list", "", {std::move(first)}};
    do {
      skip_blanks();
      if (is(")") || is("}}") || is("%}")) break;
      all.kids.push_back(expression());
    } while (skip(","));
    return all;
  }

  /// Parses operators that bind as tightly as those of a level, or tighter.
  Node binary(size_t level) {
    static const std::vector<std::string_view> levels[] = {
        {"or"}, {"and"}, {"not"}, {"==", "!=", "<=", ">=", "<", ">", "in", "not in"}, {"+", "-"}, {"~"}, {"*", "//", "/", "%"}};
    if (level == std::size(levels)) return filters(unary());
    if (level == 2) return skip("not") ? Node{"not", "", {deeper([&] { return binary(2); })}} : binary(3);
    auto left = binary(level + 1);
    Node chain;  // a < b < c
    for (bool found = true; found;) {
      found = false;
      for (const auto sign : levels[level]) {
        const auto begin = at_;
        if (sign == "not in" ? !(skip("not") && skip("in")) : !skip(sign)) {
          at_ = begin;
          continue;
        }
        found = true;
        auto right = binary(level + 1);
        Node one{std::string(sign), "", {left, right}};
        if (level == 3) {
          chain = chain.op.empty() ? std::move(one) : Node{"and", "", {std::move(chain), std::move(one)}};
          left = std::move(right);
        } else {
          left = std::move(one);
        }
        break;
      }
    }
    return chain.op.empty() ? left : chain;
  }

  Node unary() {
    if (skip("-")) return {"negative", "", {deeper([&] { return unary(); })}};
    return suffixed(primary());
  }

  Node filters(Node value) {
    for (;;) {
      if (skip("|")) {
        value = {"filter", word(), {std::move(value)}};
        if (skip("(")) arguments(value);
      } else if (skip("is")) {
        const bool inverse = skip("not");
        value = {"test", word(), {std::move(value)}};
        if (skip("(")) {
          arguments(value);
        } else if (const auto next = peek();
                   is("'") || is("\"") || is("[") || (!next.empty() && !is_listed(" else or and is if in not ", next))) {
          value.kids.push_back(suffixed(primary()));
        }
        if (inverse) value = {"not", "", {std::move(value)}};
      } else {
        return value;
      }
    }
  }

  void arguments(Node& call) {
    while (!skip(")")) {
      const auto name = peek();
      const auto begin = std::exchange(at_, at_ + name.size());
      if (!name.empty() && skip("=")) {
        call.kids.push_back({"=", name, {expression()}});
      } else {
        at_ = begin;
        call.kids.push_back(expression());
      }
      skip_blanks();
      if (!is(")")) expect(",");
    }
  }

  Node suffixed(Node value) {
    for (;;) {
      if (skip(".")) {
        value = {"attribute", word(), {std::move(value)}};
      } else if (skip("(")) {
        value = {"call", "", {std::move(value)}};
        arguments(value);
      } else if (skip("[")) {
        value = {"item", "", {std::move(value)}};
        while (!skip("]")) {
          if (skip(":")) {
            if (value.op == "item" && value.kids.size() == 1) value.kids.push_back({"const"});
            value.op = "slice";
            skip_blanks();
            value.kids.push_back(is(":") || is("]") ? Node{"const"} : expression());
          } else if (value.kids.size() == 1) {
            value.kids.push_back(expression());
          } else {
            refuse_here("']'");
          }
        }
      } else {
        return value;
      }
    }
  }

  Node constant(Value value) { return {"const", "", {}, 0, std::move(value)}; }

  Node primary() {
    skip_blanks();
    if (is("'") || is("\"")) {
      std::string all;
      for (; is("'") || is("\""); skip_blanks()) all += text();
      return constant(all);
    }
    if (is_digit(now())) {
      const auto begin = at_;
      while (is_digit(now())) at_++;
      const bool real = is(".") && is_digit(now(1));
      if (real) at_++;
      while (is_digit(now())) at_++;
      const auto digits = text_.substr(begin, at_ - begin);
      return constant(real ? Value(std::strtod(digits.c_str(), nullptr)) : Value(int64_t{std::strtoll(digits.c_str(), nullptr, 10)}));
    }
    if (skip("(")) {
      if (skip(")")) return {"list"};
      auto value = tuple();
      expect(")");
      return value;
    }
    if (skip("[")) return items("list", "]");
    if (skip("{")) return items("dict", "}");
    const auto name = is_letter(now()) ? word() : std::string();
    if (name.empty()) refuse_here("a value");
    const auto known = lower(name);
    return known == "true" || known == "false" ? constant(known == "true") : known == "none" ? constant(nullptr) : Node{"name", name};
  }

  Node items(const char* op, std::string_view end) {
    Node all{op};
    while (!skip(end)) {
      all.kids.push_back(expression());
      if (end == "}" && all.kids.size() % 2 == 1) {
        expect(":");
        continue;
      }
      skip_blanks();
      if (!is(end)) expect(",");
    }
    return all;
  }

  std::string text() {
    const char quote = text_[at_++];
    std::string out;
    for (; now() != quote; at_++) {
      if (at_ >= text_.size()) refuse("a text has no end");
      constexpr std::string_view codes = "ntrbfva\\'\"", characters = "\n\t\r\b\f\v\a\\'\"", wide = "xuU";
      if (now() != '\\') {
        out += now();
      } else if (const auto code = codes.find(now(1)); code != std::string::npos) {
        out += characters[code];
        at_++;
      } else if (const auto kind = wide.find(now(1)); kind != std::string::npos) {
        const auto value = static_cast<char32_t>(std::strtoul(text_.substr(at_ + 2, 2U << kind).c_str(), nullptr, 16));
        out += data::to_utf8({&value, 1});
        at_ += 1 + (2U << kind);
      } else {
        out += now();
      }
    }
    at_++;
    return out;
  }

  std::string text_, end_;  // end_: the name of the tag where the last body ended
  size_t at_ = 0;
  int depth_ = 0;
  char kind_ = '\0';  // of the present tag: { or %
  bool new_line_ = true;
};

}  // namespace

Node parsed(std::string_view text) {
  std::string lines;
  for (size_t i = 0; i < text.size(); i++) {
    if (text[i] != '\r') lines += text[i];
    if (text[i] == '\r' && text.substr(i + 1, 1) != "\n") lines += '\n';
  }
  if (lines.ends_with('\n')) lines.pop_back();
  if (data::invalid_utf8(lines)) throw ConfigError("the chat template is not UTF-8");
  return Parser(std::move(lines)).body("");
}

}  // namespace tessera::llm::jinja
