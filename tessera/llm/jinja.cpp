#include "tessera/llm/jinja.h"

#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/llm/jinja_parser.h"

namespace tessera::llm::jinja {
namespace {

constexpr int kMostCalls = 200;  // of macros in each other

struct Scope {
  std::shared_ptr<Scope> outer;
  Dict variables = {};
};

enum class Flow { Next, Break, Continue };

struct Run {
  std::shared_ptr<Scope> scope = std::make_shared<Scope>();
  Rendered rendered = {};
  std::string* out = &rendered.text;  // or the text of a macro, or of a block
  std::map<const Dict*, size_t> messages = {};
  int line = 1, calls = 0;

  Flow in_scope(std::shared_ptr<Scope> inner, const auto& act) {
    auto outer = std::exchange(scope, std::move(inner));
    const auto flow = act();
    scope = std::move(outer);
    return flow;
  }
  std::string written(const auto& act) {
    std::string text;
    auto* outer = std::exchange(out, &text);
    act();
    out = outer;
    return text;
  }

  Value variable(const std::string& name) const {
    for (const auto* at = scope.get(); at != nullptr; at = at->outer.get()) {
      if (const auto* found = find(at->variables, name)) return *found;
    }
    return Undefined{name};
  }

  Arguments arguments(const Node& call) {
    Arguments arguments;
    for (size_t i = 1; i < call.kids.size(); i++) {
      const auto& kid = call.kids[i];
      if (kid.op == "=") {
        arguments.named.emplace_back(kid.text, value(kid.kids[0]));
      } else {
        arguments.values.push_back(value(kid));
      }
    }
    return arguments;
  }

  Value value(const Node& node) {
    const auto& op = node.op;
    const auto& kids = node.kids;
    if (op == "const") return node.value;
    if (op == "name") return variable(node.text);
    if (op == "written") return written([&] { run(kids[0]); });
    if (op == "choose")
      return truth(value(kids[0])) ? value(kids[1]) : kids.size() > 2 ? value(kids[2]) : Value(Undefined{"a value without else"});
    if (op == "list") {
      List list;
      for (const auto& kid : kids) list.push_back(value(kid));
      return list;
    }
    if (op == "dict") {
      Dict dict;
      for (size_t i = 0; i < kids.size(); i += 2) put(dict, text_of(value(kids[i])), value(kids[i + 1]));
      return dict;
    }
    const auto left = value(kids[0]);
    if (op == "and") return truth(left) ? value(kids[1]) : left;
    if (op == "or") return truth(left) ? left : value(kids[1]);
    if (op == "not") return !truth(left);
    if (op == "negative") return arithmetic("-", int64_t{0}, left);
    if (op == "attribute") return attribute_of(left, node.text);
    if (op == "filter") return filtered(node.text, left, arguments(node));
    if (op == "test") return tested(node.text, left, arguments(node));
    if (op == "slice") return slice_of(left, arguments(node));
    if (op == "call") {
      const auto* function = left.as<std::shared_ptr<const Function>>();
      if (function == nullptr) throw UsageError("{} is called, but is not a function", kind_of(left));
      return (**function)(arguments(node));
    }
    const auto right = value(kids[1]);
    if (op == "item") {
      auto item = item_of(left, right);
      return item.is_undefined() && right.text() != nullptr ? method_of(left, *right.text()) : item;
    }
    if (op == "==") return same(left, right);
    if (op == "!=") return !same(left, right);
    if (op == "in") return contains(right, left);
    if (op == "not in") return !contains(right, left);
    if (op == "<") return less(left, right);
    if (op == ">") return less(right, left);
    if (op == "<=") return !less(right, left);
    if (op == ">=") return !less(left, right);
    return op == "~" ? Value(text_of(left) + text_of(right)) : arithmetic(op, left, right);
  }

  void assign(const Node& target, const Value& value) {
    if (target.op == "member") {
      const auto space = variable(target.kids[0].text);
      const auto* known = space.as<std::shared_ptr<Namespace>>();
      if (known == nullptr) throw UsageError("'{}' is not a namespace, so it gets no '{}'", target.kids[0].text, target.text);
      return put((*known)->members, target.text, value);
    }
    if (target.kids.size() == 1) return put(scope->variables, target.kids[0].text, value);
    const auto items = items_of(value);
    if (items.size() != target.kids.size()) throw UsageError("{} names get {} values", target.kids.size(), items.size());
    for (size_t i = 0; i < items.size(); i++) put(scope->variables, target.kids[i].text, items[i]);
  }

  Flow run(const Node& node) {
    const auto& op = node.op;
    if (node.line > 0) line = node.line;
    if (op == "text") {
      *out += node.text;
    } else if (op == "out") {
      *out += text_of(value(node.kids[0]));
    } else if (op == "body") {
      for (const auto& kid : node.kids) {
        if (const auto flow = run(kid); flow != Flow::Next) return flow;
      }
    } else if (op == "choose") {
      if (truth(value(node.kids[0]))) return run(node.kids[1]);
      if (node.kids.size() > 2) return run(node.kids[2]);
    } else if (op == "for") {
      return loop(node);
    } else if (op == "set") {
      assign(node.kids[0], value(node.kids[1]));
    } else if (op == "macro") {
      // The scope has the macro, so the macro must not keep the scope.
      put(scope->variables, node.text, Function([this, &node, outer = std::weak_ptr(scope)](const Arguments& given) -> Value {
            return called(node, outer.lock(), given);
          }));
    } else if (op == "generation") {
      const auto begin = out->size();
      const auto flow = in_scope(std::make_shared<Scope>(scope), [&] { return run(node.kids[0]); });
      if (out == &rendered.text) rendered.generated.push_back({begin, out->size()});
      return flow;
    } else {
      return op == "break" ? Flow::Break : Flow::Continue;
    }
    return Flow::Next;
  }

  Value called(const Node& macro, std::shared_ptr<Scope> outer, const Arguments& given) {
    const auto count = macro.kids.size() - 1;
    if (given.values.size() > count) throw UsageError("{}() gets {} arguments", macro.text, given.values.size());
    if (++calls > kMostCalls) throw UsageError("{}() calls itself too often", macro.text);
    auto text = written([&] {
      in_scope(std::make_shared<Scope>(std::move(outer)), [&] {
        for (size_t i = 0; i < count; i++) {
          const auto& parameter = macro.kids[i];
          auto argument = given.at(i, parameter.text);
          if (argument.is_undefined() && !parameter.kids.empty()) argument = value(parameter.kids[0]);
          put(scope->variables, parameter.text, std::move(argument));
        }
        return run(macro.kids.back());
      });
    });
    calls--;
    return text;
  }

  Flow loop(const Node& node) {
    auto all = items_of(value(node.kids[1]));
    std::erase_if(all, [&](const Value& item) {
      bool wanted = false;
      in_scope(std::make_shared<Scope>(scope), [&] { return assign(node.kids[0], item), wanted = truth(value(node.kids[2])), Flow::Next; });
      return !wanted;
    });
    const auto count = std::ssize(all);
    for (int64_t i = 0; i < count; i++) {
      const auto& item = all[static_cast<size_t>(i)];
      const auto neighbour = [&](int64_t at) { return at >= 0 && at < count ? all[static_cast<size_t>(at)] : Undefined{"the item"}; };
      const auto begin = out->size();
      const auto flow = in_scope(std::make_shared<Scope>(scope), [&] {
        put(scope->variables, "loop",
            Dict{{"index", i + 1},
                 {"index0", i},
                 {"revindex", count - i},
                 {"revindex0", count - i - 1},
                 {"first", i == 0},
                 {"last", i + 1 == count},
                 {"length", count},
                 {"previtem", neighbour(i - 1)},
                 {"nextitem", neighbour(i + 1)}});
        assign(node.kids[0], item);
        return run(node.kids[3]);
      });
      const auto turn = out == &rendered.text ? messages.find(item.dict()) : messages.end();
      if (turn != messages.end() && out->size() > begin) rendered.turns[turn->second].push_back({begin, out->size()});
      if (flow == Flow::Break) break;
    }
    return count == 0 ? run(node.kids[4]) : Flow::Next;
  }
};

}  // namespace

struct Template::Program {
  Node all;
};

Template::Template(std::string_view text) : program_(std::make_shared<Program>(parsed(text))) {}

Rendered Template::render(const nlohmann::ordered_json& variables) const {
  Run run;
  const auto given = value_of(variables);
  run.scope->variables = global_functions();
  for (const auto& [name, value] : *given.dict()) put(run.scope->variables, name, value);
  for (const auto& message : items_of(run.variable("messages"))) run.messages.emplace(message.dict(), run.messages.size());
  run.rendered.turns.resize(run.messages.size());
  try {
    run.run(program_->all);
  } catch (const UsageError& error) {
    throw UsageError("the chat template, line {}: {}", run.line, error.what());
  }
  return std::move(run.rendered);
}

}  // namespace tessera::llm::jinja
