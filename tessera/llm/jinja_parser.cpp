// Parses chat templates.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/unicode.h"
#include "tessera/llm/jinja_values.h"

namespace tessera::llm::jinja {
namespace {

using Op = Node::Op;
constexpr int kDeepest = 200;  // tags and brackets in each other

enum class Sort { Text, Quoted, Number, Name, Sign };

struct Token {
  Sort sort;
  std::string text;
  int line;
};

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_letter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}
[[noreturn]] void refuse_template(int line, std::string_view why) {
  throw ConfigError("line {}: {}", line, why);
}

std::string unescaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); i++) {
    constexpr std::string_view codes = "ntr\\'\"";
    const auto code = text[i] == '\\' && i + 1 < text.size() ? codes.find(text[i + 1]) : std::string::npos;
    out += code == std::string::npos ? text[i] : "\n\t\r\\'\""[code];
    i += code == std::string::npos ? 0 : 1;
  }
  return out;
}

/// Cuts a template into its texts and the words and signs of its tags.
class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  std::vector<Token> tokens() {
    while (at_ < text_.size()) {
      const auto open = std::min({text_.find("{{", at_), text_.find("{%", at_), text_.find("{#", at_), text_.size()});
      auto text = text_.substr(at_, open - at_);
      const auto line = at_ + text.rfind('\n') + 1;  // where the last line begins
      const char kind = at(open - at_ + 1), sign = at(open - at_ + 2);
      if (sign == '-') {
        text = stripped(text, "rstrip");
      } else if (sign != '+' && (kind == '%' || kind == '#') && (line == 0 || text_[line - 1] == '\n') &&
                 stripped(text_.substr(line, open - line)).empty()) {
        text = text.substr(0, line - at_);
      }
      if (!text.empty()) add(Sort::Text, std::string(text));
      skip(open - at_);
      if (kind != '\0') tag(kind, sign == '-' || sign == '+' ? 3 : 2);
    }
    add(Sort::Sign, "the end");
    return std::move(tokens_);
  }

 private:
  char at(size_t ahead) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  void add(Sort sort, std::string text) { tokens_.push_back({sort, std::move(text), line_}); }
  void skip(size_t size) {
    line_ += static_cast<int>(std::ranges::count(text_.substr(at_, size), '\n'));
    at_ += size;
  }
  void skip_blanks() { skip(text_.size() - at_ - stripped(text_.substr(at_), "lstrip").size()); }

  /// Reads a tag, with the blanks after it that belong to it.
  void tag(char kind, size_t begin) {
    const std::string end = kind == '{' ? "}}" : kind == '%' ? "%}" : "#}";
    if (kind != '#') add(Sort::Sign, std::string(text_.substr(at_, 2)));
    skip(begin);
    const auto ends = [&] {
      if (kind != '#') skip_blanks();
      const bool sign = at(0) == '-' || (at(0) == '+' && kind != '{');
      return depth_ == 0 && text_.substr(at_ + (sign ? 1 : 0), 2) == end;
    };
    for (depth_ = 0; !ends();) {
      if (at_ >= text_.size() && kind == '#') refuse_template(line_, "a comment has no end");
      if (at_ >= text_.size()) return;
      kind == '#' ? skip(1) : word();
    }
    if (kind != '#') add(Sort::Sign, end);
    const char sign = at(0);
    skip(sign == '-' || sign == '+' ? 3 : 2);
    if (sign == '-') {
      skip_blanks();
    } else if (sign != '+' && kind != '{' && at(0) == '\n') {
      skip(1);
    }
  }

  void word() {
    const char first = at(0);
    const bool is_number = is_digit(first);
    size_t size = 1;
    if (is_letter(first)) {
      while (is_letter(at(size)) || (is_number && at(size) == '.' && is_digit(at(size + 1)))) size++;
      add(is_number ? Sort::Number : Sort::Name, std::string(text_.substr(at_, size)));
    } else if (first == '\'' || first == '"') {
      while (at(size) != first && at(size) != '\0') size += at(size) == '\\' ? 2 : 1;
      if (at(size) == '\0') refuse_template(line_, "a text has no end");
      add(Sort::Quoted, unescaped(text_.substr(at_ + 1, size++ - 1)));
    } else {
      if (is_listed(" == != <= >= // ", text_.substr(at_, 2))) size = 2;
      depth_ += is_listed(" ( [ { ", {&first, 1}) ? 1 : is_listed(" ) ] } ", {&first, 1}) ? -1 : 0;
      add(Sort::Sign, std::string(text_.substr(at_, size)));
    }
    skip(size);
  }

  std::string_view text_;
  std::vector<Token> tokens_ = {};
  size_t at_ = 0;
  int line_ = 1, depth_ = 0;
};

constexpr std::string_view kOperators[] = {"", " or ", " and ", " ", " == != < > <= >= in not ", " + - ", " ~ ", " * / // % "};
constexpr size_t kNot = 3, kCompare = 4;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  /// Parses up to a tag with one of these names, and goes over the name.
  Node body(std::string_view ends, int begun = 1) {
    Node all{.op = Op::Body};
    while (!at("the end")) {
      const auto line = now().line;
      if (now().sort == Sort::Text) {
        all.kids.push_back({Op::Text, tokens_[at_++].text});
      } else if (skip("{{")) {
        all.kids.push_back({Op::Out, "", {tuple()}, line});
        expect("}}");
      } else {
        expect("{%");
        const auto tag = name();
        if (is_listed(ends, end_ = tag)) return all;
        all.kids.push_back(deeper([&] { return statement(tag); }));
        all.kids.back().line = line;
        expect("%}");
      }
    }
    if (!ends.empty()) refuse_template(begun, fmt::format("a tag has no '{}'", stripped(ends.substr(ends.rfind(" e")))));
    return all;
  }

 private:
  const Token& now() const { return tokens_[at_]; }
  bool at(std::string_view text) const { return (now().sort == Sort::Sign || now().sort == Sort::Name) && now().text == text; }
  bool skip(std::string_view text) { return at(text) ? at_++, true : false; }
  [[noreturn]] void refuse_here(std::string_view wanted) const {
    refuse_template(now().line, fmt::format("there is '{}' in place of {}", printable(now().text), wanted));
  }
  void expect(std::string_view text) {
    if (!skip(text)) refuse_here(fmt::format("'{}'", text));
  }
  std::string name() {
    if (now().sort != Sort::Name) refuse_here("a name");
    return tokens_[at_++].text;
  }
  Node deeper(const auto& parse) {
    if (++depth_ > kDeepest) refuse_template(now().line, "it has too many tags or brackets in each other");
    auto node = parse();
    depth_--;
    return node;
  }
  static Node constant(Value value) { return {Op::Constant, "", {}, 0, std::move(value)}; }

  Node block(std::string_view ends) {
    const auto begun = now().line;
    expect("%}");
    return body(ends, begun);
  }

  Node statement(const std::string& tag) {
    if (tag == "if") {
      Node all{Op::If, "", {expression()}};
      all.kids.push_back(block(" elif else endif "));
      if (end_ == "elif") {
        all.kids.push_back(deeper([&] { return statement("if"); }));
      } else if (end_ == "else") {
        all.kids.push_back(block(" endif "));
      }
      return all;
    }
    if (tag == "for") {
      Node all{Op::For, "", {target()}};
      expect("in");
      all.kids.push_back(operation(0));
      all.kids.push_back(skip("if") ? expression() : constant(true));
      all.kids.push_back(block(" else endfor "));
      all.kids.push_back(end_ == "else" ? block(" endfor ") : Node{Op::Body});
      return all;
    }
    if (tag == "set") {
      auto names = target();
      auto value = skip("=") ? tuple() : Node{Op::Written, "", {block(" endset ")}};
      return {Op::Set, "", {std::move(names), std::move(value)}};
    }
    if (tag == "macro") {
      Node all{Op::Macro, name()};
      expect("(");
      all = items(std::move(all), ")");
      all.kids.push_back(block(" endmacro "));
      return all;
    }
    if (tag == "generation") return {Op::Generation, "", {block(" endgeneration ")}};
    if (tag != "break" && tag != "continue") refuse_template(now().line, fmt::format("the tag '{}' is not supported", tag));
    return {tag == "break" ? Op::Break : Op::Continue};
  }

  /// Names that get values: a, b or space.member.
  Node target() {
    const bool bracket = skip("(");
    Node all{Op::List, "", {{Op::Name, name()}}};
    if (skip(".")) return {Op::Pair, name(), std::move(all.kids)};
    while (skip(",")) all.kids.push_back({Op::Name, name()});
    if (bracket) expect(")");
    return all.kids.size() == 1 ? Node(all.kids[0]) : all;
  }

  Node tuple() {
    auto first = expression();
    if (!skip(",")) return first;
    Node all{Op::List, "", {std::move(first)}};
    do {
      if (at(")") || at("}}") || at("%}")) break;
      all.kids.push_back(expression());
    } while (skip(","));
    return all;
  }

  Node expression() {
    auto value = operation(0);
    if (!skip("if")) return value;
    Node all{Op::If, "", {operation(0), std::move(value)}};
    if (skip("else")) all.kids.push_back(deeper([&] { return expression(); }));
    return all;
  }

  /// Parses operators that bind more tightly than those of a level.
  Node operation(size_t above) {
    return deeper([&] {
      auto left = skip("not") ? Node{Op::Apply, "not", {operation(kNot)}} : filters(unary());
      for (bool compared = false;;) {
        auto level = now().sort == Sort::Sign || now().sort == Sort::Name ? std::size(kOperators) - 1 : 0;
        while (level > above && !is_listed(kOperators[level], now().text)) level--;
        if (level <= above) return left;
        if (level == kCompare && std::exchange(compared, true)) refuse_here("'and'; a < b < c is not supported");
        auto sign = tokens_[at_++].text;
        if (sign == "not") expect("in");
        const auto op = sign == "or" ? Op::Or : sign == "and" ? Op::And : Op::Apply;
        left = {op, sign == "not" ? "not in" : sign, {std::move(left), operation(level)}};
        compared = compared && level == kCompare;
      }
    });
  }

  Node unary() {
    if (skip("-")) return {Op::Apply, "-", {constant(0), deeper([&] { return unary(); })}};
    return suffixed(primary());
  }

  Node filters(Node value) {
    for (;;) {
      if (skip("|")) {
        value = {Op::Apply, "|" + name(), {std::move(value)}};
        if (skip("(")) value = items(std::move(value), ")");
      } else if (skip("is")) {
        const bool inverse = skip("not");
        value = {Op::Apply, "is " + name(), {std::move(value)}};
        if (now().sort == Sort::Quoted || now().sort == Sort::Number || at("(") || at("[") ||
            (now().sort == Sort::Name && !is_listed(" else or and is if in not ", now().text)))
          value.kids.push_back(suffixed(primary()));
        if (inverse) value = {Op::Apply, "not", {std::move(value)}};
      } else {
        return value;
      }
    }
  }

  Node suffixed(Node value) {
    const auto part = [&] { return at(":") || at("]") ? constant(nullptr) : expression(); };
    for (;;) {
      if (skip(".")) {
        value = {Op::Item, ".", {std::move(value), constant(name())}};
      } else if (skip("(")) {
        value = items({Op::Call, "", {std::move(value)}}, ")");
      } else if (skip("[")) {
        value = {Op::Item, "[", {std::move(value), part()}};
        while (skip(":")) {
          value.op = Op::Apply;
          value.text = "slice";
          value.kids.push_back(part());
        }
        expect("]");
      } else {
        return value;
      }
    }
  }

  /// Parses values, and pairs `key: value` and `name=value`, up to a bracket.
  Node items(Node all, std::string_view end) {
    while (!skip(end)) {
      auto value = expression();
      if (skip("=")) value = {Op::Pair, "", {constant(value.text), expression()}};
      if (skip(":")) value = {Op::Pair, "", {std::move(value), expression()}};
      all.kids.push_back(std::move(value));
      if (!at(end)) expect(",");
    }
    return all;
  }

  Node primary() {
    if (now().sort == Sort::Quoted) {
      std::string all;
      while (now().sort == Sort::Quoted) all += tokens_[at_++].text;
      return constant(all);
    }
    if (now().sort == Sort::Number) {
      const auto number = Value::parse(now().text, nullptr, /*allow_exceptions=*/false);
      if (number.is_discarded()) refuse_here("a number");
      at_++;
      return constant(number);
    }
    if (skip("(")) {
      if (skip(")")) return {Op::List};
      auto value = tuple();
      expect(")");
      return value;
    }
    if (skip("[")) return items({Op::List}, "]");
    if (skip("{")) return items({Op::Dict}, "}");
    if (now().sort != Sort::Name) refuse_here("a value");
    const auto word = name(), known = lower(word);
    return known == "true" || known == "false" ? constant(known == "true") : known == "none" ? constant(nullptr) : Node{Op::Name, word};
  }

  std::vector<Token> tokens_;
  std::string end_ = {};  // the name of the tag where the last body ended
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

Node parsed(std::string_view text) {
  std::string lines(text);
  std::erase(lines, '\r');
  if (lines.ends_with('\n')) lines.pop_back();
  if (data::invalid_utf8(lines)) refuse_template(1, "it is not UTF-8");
  return Parser(Lexer(lines).tokens()).body("");
}

}  // namespace tessera::llm::jinja
