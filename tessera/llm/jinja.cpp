#include "tessera/llm/jinja.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/llm/jinja_lexer.h"
#include "tessera/llm/jinja_values.h"

namespace tessera::llm::jinja {
namespace {

using Kind = Token::Kind;
constexpr int kDeepest = 200;  // tags and brackets in each other, and calls of macros

struct Scope {
  std::shared_ptr<Scope> outer;
  Dict variables = {};
};

struct Run {
  std::shared_ptr<Scope> scope = std::make_shared<Scope>();
  Rendered rendered = {};
  std::string* out = &rendered.text;  // or the text of a macro, or of a block
  std::unordered_map<const Dict*, size_t> messages = {};
  int line = 1, depth = 0;
};

using Expression = std::function<Value(Run&)>;
enum class Flow { Next, Break, Continue };
using Statement = std::function<Flow(Run&)>;
using Target = std::function<void(Run&, const Value&)>;

std::string written(Run& run, const Statement& body) {
  std::string text;
  auto* out = std::exchange(run.out, &text);
  body(run);
  run.out = out;
  return text;
}

Flow in_scope(Run& run, std::shared_ptr<Scope> scope, const auto& act) {
  auto outer = std::exchange(run.scope, std::move(scope));
  const auto flow = act();
  run.scope = std::move(outer);
  return flow;
}

bool is_word(std::string_view words, const std::string& word) {
  return words.find(" " + word + " ") != std::string::npos;
}

struct Call {
  std::vector<Expression> values;
  std::vector<std::pair<std::string, Expression>> named;

  Arguments operator()(Run& run) const {
    Arguments arguments;
    for (const auto& value : values) arguments.values.push_back(value(run));
    for (const auto& [name, value] : named) arguments.named.emplace_back(name, value(run));
    return arguments;
  }
};

class Parser {
 public:
  explicit Parser(std::string_view text) : tokens_(tokens_of(text)) {}

  Statement parse() {
    auto all = body({});
    if (now().kind != Kind::End) refuse(fmt::format("'{}' has no beginning", now().text));
    return all;
  }

 private:
  const Token& now(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  bool is(Kind kind, std::string_view text, size_t ahead = 0) const { return now(ahead).kind == kind && now(ahead).text == text; }
  bool is_sign(std::string_view text) const { return is(Kind::Sign, text); }
  bool is_name(std::string_view text) const { return is(Kind::Name, text); }
  bool skip(Kind kind, std::string_view text) {
    const bool found = is(kind, text);
    if (found) at_++;
    return found;
  }
  bool skip_sign(std::string_view text) { return skip(Kind::Sign, text); }
  bool skip_name(std::string_view text) { return skip(Kind::Name, text); }
  [[noreturn]] void refuse(std::string_view why) const { refuse_at(now().line, why); }
  void expect_sign(std::string_view text) {
    if (!skip_sign(text)) refuse(fmt::format("there is '{}' in place of '{}'", printable(now().text), text));
  }
  std::string name() {
    if (now().kind != Kind::Name) refuse(fmt::format("there is '{}' in place of a name", printable(now().text)));
    return tokens_[at_++].text;
  }
  /// Calls `parse` one level deeper.
  auto deeper(const auto& parse) {
    if (++depth_ > kDeepest) refuse("it has too many tags or brackets in each other");
    auto parsed = parse();
    depth_--;
    return parsed;
  }

  // Statements

  /// Parses up to a tag with one of these names, and stays before the name.
  Statement body(std::initializer_list<std::string_view> ends) {
    return deeper([&]() -> Statement {
      std::vector<Statement> all;
      const auto begin = now().line;
      for (;; at_++) {
        if (now().kind == Kind::End) {
          if (ends.size() != 0) refuse_at(begin, fmt::format("a tag has no '{}'", *(ends.end() - 1)));
          break;
        }
        if (now().kind == Kind::Data) {
          all.emplace_back([text = now().text](Run& run) { return run.out->append(text), Flow::Next; });
          continue;
        }
        const auto line = now().line;
        if (skip_sign("{{")) {
          all.emplace_back([line, value = tuple()](Run& run) {
            run.line = line;
            return run.out->append(text_of(value(run))), Flow::Next;
          });
          if (!is_sign("}}")) expect_sign("}}");
          continue;
        }
        at_++;
        if (std::ranges::find(ends, now().text) != ends.end()) break;
        all.emplace_back([line, statement = tag()](Run& run) { return run.line = line, statement(run); });
        if (!is_sign("%}")) expect_sign("%}");
      }
      return [all = std::move(all)](Run& run) {
        for (const auto& statement : all) {
          if (const auto flow = statement(run); flow != Flow::Next) return flow;
        }
        return Flow::Next;
      };
    });
  }

  /// Goes over the end of a tag, then parses up to a tag with one of these names, and goes over the name.
  std::pair<Statement, std::string> block(std::initializer_list<std::string_view> ends) {
    expect_sign("%}");
    auto parsed = body(ends);
    return {std::move(parsed), name()};
  }

  Statement tag() {
    const auto line = now().line;
    const auto kind = name();
    if (kind == "if") return if_tag();
    if (kind == "for") return for_tag();
    if (kind == "set") return set_tag();
    if (kind == "macro") return macro_tag();
    if (kind == "break") return [](Run&) { return Flow::Break; };
    if (kind == "continue") return [](Run&) { return Flow::Continue; };
    if (kind == "generation") {
      return [body = block({"endgeneration"}).first](Run& run) {
        const auto begin = run.out->size();
        const auto flow = in_scope(run, std::make_shared<Scope>(run.scope), [&] { return body(run); });
        if (run.out == &run.rendered.text) run.rendered.generated.push_back({begin, run.out->size()});
        return flow;
      };
    }
    if (kind == "filter") {
      auto through = filters([text = std::make_shared<std::string>()](Run& run) { return Value(*run.out); }, true);
      return [through, body = block({"endfilter"}).first](Run& run) {
        auto text = written(run, body);
        auto* out = std::exchange(run.out, &text);
        const auto value = through(run);
        run.out = out;
        return run.out->append(text_of(value)), Flow::Next;
      };
    }
    refuse_at(line, fmt::format("the tag '{}' is not supported", kind));
  }

  Statement if_tag() {
    auto condition = expression();
    auto [then, end] = block({"elif", "else", "endif"});
    Statement otherwise = [](Run&) { return Flow::Next; };
    if (end == "elif") otherwise = deeper([&] { return if_tag(); });
    if (end == "else") otherwise = block({"endif"}).first;
    return [=, then = std::move(then)](Run& run) { return truth(condition(run)) ? then(run) : otherwise(run); };
  }

  Target target() {
    std::vector<std::string> names = {name()};
    if (skip_sign(".")) {
      return [space = names.front(), member = name()](Run& run, const Value& value) {
        const auto found = variable(run, space);
        const auto* known = found.as<std::shared_ptr<Namespace>>();
        if (known == nullptr) throw UsageError("'{}' is not a namespace, so it gets no '{}'", space, member);
        put((*known)->members, member, value);
      };
    }
    while (skip_sign(",")) names.push_back(name());
    return [names](Run& run, const Value& value) {
      if (names.size() == 1) return put(run.scope->variables, names.front(), value);
      const auto items = items_of(value);
      if (items.size() != names.size()) throw UsageError("{} names get {} values", names.size(), items.size());
      for (size_t i = 0; i < names.size(); i++) put(run.scope->variables, names[i], items[i]);
    };
  }

  Statement for_tag() {
    const bool bracket = skip_sign("(");
    auto item = target();
    if (bracket) expect_sign(")");
    if (!skip_name("in")) refuse("'for' has no 'in'");
    auto values = either();
    Expression wanted = skip_name("if") ? expression() : nullptr;
    auto [inner, end] = block({"else", "endfor"});
    Statement otherwise = [](Run&) { return Flow::Next; };
    if (end == "else") otherwise = block({"endfor"}).first;
    return [=, body = std::move(inner)](Run& run) {
      auto all = items_of(values(run));
      if (wanted) {
        std::erase_if(all, [&](const Value& value) {
          bool keep = false;
          in_scope(run, std::make_shared<Scope>(run.scope), [&] { return item(run, value), keep = truth(wanted(run)), Flow::Next; });
          return !keep;
        });
      }
      const auto count = std::ssize(all);
      for (int64_t i = 0; i < count; i++) {
        const auto& value = all[static_cast<size_t>(i)];
        auto scope = std::make_shared<Scope>(run.scope);
        scope->variables.emplace_back("loop", Dict{{"index", i + 1},
                                                   {"index0", i},
                                                   {"revindex", count - i},
                                                   {"revindex0", count - i - 1},
                                                   {"first", i == 0},
                                                   {"last", i + 1 == count},
                                                   {"length", count},
                                                   {"previtem", i > 0 ? all[static_cast<size_t>(i - 1)] : Undefined{"previtem"}},
                                                   {"nextitem", i + 1 < count ? all[static_cast<size_t>(i + 1)] : Undefined{"nextitem"}}});
        const auto begin = run.out->size();
        const auto flow = in_scope(run, std::move(scope), [&] { return item(run, value), body(run); });
        const auto turn = run.out == &run.rendered.text ? run.messages.find(value.dict()) : run.messages.end();
        if (turn != run.messages.end() && run.out->size() > begin) run.rendered.turns[turn->second].push_back({begin, run.out->size()});
        if (flow == Flow::Break) break;
      }
      return count == 0 ? otherwise(run) : Flow::Next;
    };
  }

  Statement set_tag() {
    auto assign = target();
    if (skip_sign("=")) return [assign, value = tuple()](Run& run) { return assign(run, value(run)), Flow::Next; };
    auto through = filters([](Run& run) { return Value(*run.out); }, false);
    return [=, body = block({"endset"}).first](Run& run) {
      auto text = written(run, body);
      auto* out = std::exchange(run.out, &text);
      const auto value = through(run);
      run.out = out;
      return assign(run, value), Flow::Next;
    };
  }

  Statement macro_tag() {
    auto own = name();
    std::vector<std::pair<std::string, Expression>> parameters;
    expect_sign("(");
    while (!skip_sign(")")) {
      parameters.emplace_back(name(), nullptr);
      if (skip_sign("=")) parameters.back().second = expression();
      if (!is_sign(")")) expect_sign(",");
    }
    return [=, body = block({"endmacro"}).first](Run& run) {
      const auto outer = std::weak_ptr(run.scope);  // which has this macro
      auto macro = [&run, own, parameters, body, outer](const Arguments& arguments) -> Value {
        if (arguments.values.size() > parameters.size()) throw UsageError("{}() gets {} arguments", own, arguments.values.size());
        if (++run.depth > kDeepest) throw UsageError("{}() calls itself too often", own);
        auto scope = std::make_shared<Scope>(outer.lock());
        std::string text;
        auto* out = std::exchange(run.out, &text);
        in_scope(run, scope, [&] {
          for (size_t i = 0; i < parameters.size(); i++) {
            auto value = arguments.at(i, parameters[i].first);
            if (value.is_undefined() && parameters[i].second) value = parameters[i].second(run);
            put(scope->variables, parameters[i].first, std::move(value));
          }
          return body(run);
        });
        run.out = out;
        run.depth--;
        return text;
      };
      return put(run.scope->variables, own, Function(macro)), Flow::Next;
    };
  }

  // Expressions

  static Value variable(Run& run, const std::string& name) {
    for (const auto* scope = run.scope.get(); scope != nullptr; scope = scope->outer.get()) {
      if (const auto* found = find(scope->variables, name)) return *found;
    }
    return Undefined{name};
  }

  Expression expression() {
    return deeper([&]() -> Expression {
      auto value = either();
      while (skip_name("if")) {
        auto condition = either();
        Expression otherwise = skip_name("else") ? expression() : [](Run&) { return Value(Undefined{"the value without else"}); };
        value = [=](Run& run) { return truth(condition(run)) ? value(run) : otherwise(run); };
      }
      return value;
    });
  }

  Expression tuple() {
    auto first = expression();
    if (!is_sign(",")) return first;
    std::vector<Expression> values = {std::move(first)};
    while (skip_sign(",") && !is_sign(")") && !is_sign("%}") && !is_sign("}}")) values.push_back(expression());
    return list_of(std::move(values));
  }

  static Expression list_of(std::vector<Expression> values) {
    return [values = std::move(values)](Run& run) -> Value {
      List list;
      for (const auto& value : values) list.push_back(value(run));
      return list;
    };
  }

  Expression either() {
    auto left = both();
    while (skip_name("or")) {
      left = [left, right = both()](Run& run) {
        auto value = left(run);
        return truth(value) ? value : right(run);
      };
    }
    return left;
  }

  Expression both() {
    auto left = negation();
    while (skip_name("and")) {
      left = [left, right = negation()](Run& run) {
        auto value = left(run);
        return truth(value) ? right(run) : value;
      };
    }
    return left;
  }

  Expression negation() {
    if (!skip_name("not")) return comparison();
    return deeper([&]() -> Expression { return [value = negation()](Run& run) { return Value(!truth(value(run))); }; });
  }

  Expression comparison() {
    auto left = sum();
    Expression all;
    for (;;) {
      std::string sign;
      if (is_name("not") && is(Kind::Name, "in", 1)) at_++, sign = "not ";
      if (is_name("in") || (now().kind == Kind::Sign && is_word(" == != < > <= >= ", now().text)))
        sign += tokens_[at_++].text;
      if (sign.empty()) return all ? all : left;
      auto right = sum();
      Expression one = [sign, left, right](Run& run) -> Value {
        const auto a = left(run), b = right(run);
        if (sign == "==") return same(a, b);
        if (sign == "!=") return !same(a, b);
        if (sign == "in") return contains(b, a);
        if (sign == "not in") return !contains(b, a);
        if (sign == "<") return less(a, b);
        if (sign == ">") return less(b, a);
        return sign == "<=" ? !less(b, a) : !less(a, b);
      };
      all = all ? [all, one](Run& run) { return truth(all(run)) ? one(run) : Value(false); } : one;
      left = right;
    }
  }

  Expression computed(std::initializer_list<std::string_view> signs, const auto& operand) {
    auto left = operand();
    while (now().kind == Kind::Sign && std::ranges::find(signs, now().text) != signs.end()) {
      const auto sign = tokens_[at_++].text;
      left = [sign, left, right = operand()](Run& run) -> Value {
        const auto a = left(run), b = right(run);
        return sign == "~" ? Value(text_of(a) + text_of(b)) : arithmetic(sign, a, b);
      };
    }
    return left;
  }
  Expression sum() {
    return computed({"+", "-"}, [&] { return computed({"~"}, [&] { return computed({"*", "/", "//", "%"}, [&] { return filters(unary(), false); }); }); });
  }

  Expression unary() {
    if (!skip_sign("-")) return suffixed(primary());
    return deeper([&]() -> Expression { return [value = unary()](Run& run) { return arithmetic("-", int64_t{0}, value(run)); }; });
  }

  Call arguments() {
    Call call;
    while (!skip_sign(")")) {
      if (now().kind == Kind::Name && is(Kind::Sign, "=", 1)) {
        auto key = name();
        at_++;
        call.named.emplace_back(std::move(key), expression());
      } else {
        call.values.push_back(expression());
      }
      if (!is_sign(")")) expect_sign(",");
    }
    return call;
  }

  /// Parses filters, tests and calls after a value; `begun`: the first filter has no | before it.
  Expression filters(Expression value, bool begun) {
    for (;;) {
      if (begun || skip_sign("|")) {
        begun = false;
        value = applied(std::move(value), false);
      } else if (skip_name("is")) {
        const bool inverse = skip_name("not");
        value = applied(std::move(value), true);
        if (inverse) value = [value](Run& run) { return Value(!truth(value(run))); };
      } else {
        return value;
      }
    }
  }

  Expression applied(Expression value, bool is_test) {
    const auto own = name();
    Call call;
    if (skip_sign("(")) {
      call = arguments();
    } else if (is_test && (now().kind == Kind::Text || now().kind == Kind::Integer || is_sign("[") ||
                           (now().kind == Kind::Name && !is_word(" else or and is if in not ", now().text)))) {
      call.values.push_back(suffixed(primary()));
    }
    return [=](Run& run) -> Value {
      const auto given = value(run);
      if (is_test) return tested(own, given, call(run));
      return filtered(own, given, call(run));
    };
  }

  Expression suffixed(Expression value) {
    for (;;) {
      if (skip_sign(".")) {
        if (now().kind == Kind::Integer) {
          value = [value, at = int64_t{std::stoi(tokens_[at_++].text)}](Run& run) { return item_of(value(run), at); };
        } else {
          value = [value, member = name()](Run& run) { return attribute_of(value(run), member); };
        }
      } else if (skip_sign("(")) {
        value = [value, call = arguments()](Run& run) {
          const auto found = value(run);
          const auto* function = found.as<std::shared_ptr<const Function>>();
          if (function == nullptr) throw UsageError("{} is called, but is not a function", kind_of(found));
          return (**function)(call(run));
        };
      } else if (skip_sign("[")) {
        value = subscript(std::move(value));
      } else {
        return value;
      }
    }
  }

  Expression subscript(Expression value) {
    const Expression none = [](Run&) { return Value(nullptr); };
    Expression parts[3] = {none, none, none};
    int count = 0;
    for (;; count++) {
      if (!is_sign(":") && !is_sign("]")) parts[count] = expression();
      if (count == 2 || !skip_sign(":")) break;
    }
    expect_sign("]");
    if (count > 0) return [=, begin = parts[0], end = parts[1], step = parts[2]](Run& run) { return slice_of(value(run), begin(run), end(run), step(run)); };
    return [value, key = parts[0]](Run& run) {
      const auto from = value(run), at = key(run);
      auto item = item_of(from, at);
      return item.is_undefined() && at.text() != nullptr ? method_of(from, *at.text()) : item;
    };
  }

  Expression primary() {
    const auto token = now();
    const auto constant = [](Value value) -> Expression { return [value = std::move(value)](Run&) { return value; }; };
    at_++;
    if (token.kind == Kind::Name) {
      const auto word = lower(token.text);
      if (word == "true" || word == "false") return constant(word == "true");
      if (word == "none") return constant(nullptr);
      return [name = token.text](Run& run) { return variable(run, name); };
    }
    if (token.kind == Kind::Integer) return constant(int64_t{std::strtoll(token.text.c_str(), nullptr, 10)});
    if (token.kind == Kind::Real) return constant(std::strtod(token.text.c_str(), nullptr));
    if (token.kind == Kind::Text) {
      auto text = token.text;
      for (; now().kind == Kind::Text; at_++) text += now().text;
      return constant(text);
    }
    if (token.text == "(") {
      auto value = is_sign(")") ? list_of({}) : tuple();
      expect_sign(")");
      return value;
    }
    if (token.text == "[") {
      std::vector<Expression> values;
      while (!skip_sign("]")) {
        values.push_back(expression());
        if (!is_sign("]")) expect_sign(",");
      }
      return list_of(std::move(values));
    }
    if (token.text != "{") refuse_at(token.line, fmt::format("there is '{}' in place of a value", printable(token.text)));
    std::vector<std::pair<Expression, Expression>> items;
    while (!skip_sign("}")) {
      auto key = expression();
      expect_sign(":");
      items.emplace_back(std::move(key), expression());
      if (!is_sign("}")) expect_sign(",");
    }
    return [items](Run& run) -> Value {
      Dict dict;
      for (const auto& [key, value] : items) put(dict, text_of(key(run)), value(run));
      return dict;
    };
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

struct Template::Program {
  Statement run;
};

Template::Template(std::string_view text) : program_(std::make_shared<Program>(Parser(text).parse())) {}

Rendered Template::render(const nlohmann::ordered_json& variables) const {
  Run run;
  const auto given = value_of(variables);
  run.scope->variables = global_functions();
  for (const auto& [name, value] : *given.dict()) put(run.scope->variables, name, value);
  if (const auto* messages = find(*given.dict(), "messages"); messages != nullptr && messages->list() != nullptr) {
    for (const auto& message : *messages->list()) run.messages.emplace(message.dict(), run.messages.size());
  }
  run.rendered.turns.resize(run.messages.size());
  run.scope = std::make_shared<Scope>(run.scope);
  try {
    program_->run(run);
  } catch (const UsageError& error) {
    throw UsageError("the chat template, line {}: {}", run.line, error.what());
  }
  return std::move(run.rendered);
}

}  // namespace tessera::llm::jinja
