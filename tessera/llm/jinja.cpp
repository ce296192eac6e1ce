#include "tessera/llm/jinja.h"

#include <deque>
#include <map>

#include "tessera/base/error.h"
#include "tessera/llm/jinja_values.h"

namespace tessera::llm::jinja {
namespace {

using Op = Node::Op;
constexpr int kMostCalls = 200;  // of macros in each other

struct Scope {
  Scope* outer = nullptr;
  Value variables = Value::object();
};

enum class Flow { Next, Break, Continue };

struct Run {
  Scope globals = {};  // macros see these only
  Scope* scope = &globals;
  std::map<std::string, const Node*> macros = {};
  std::deque<Value> spaces = {};  // namespaces, which values refer to by number
  Rendered rendered = {};
  std::string* out = &rendered.text;  // or the text of a macro, or of a block
  int line = 1, calls = 0;

  Flow in_scope(Scope* around, const auto& act) {
    Scope inner{around};
    auto* outer = std::exchange(scope, &inner);
    const auto flow = act();
    scope = outer;
    return flow;
  }
  std::string written(const auto& act) {
    std::string text;
    auto* outer = std::exchange(out, &text);
    act();
    out = outer;
    return text;
  }

  Value* variable(const std::string& name) const {
    for (auto* at = scope; at != nullptr; at = at->outer) {
      if (const auto found = at->variables.find(name); found != at->variables.end()) return &*found;
    }
    return nullptr;
  }

  Value* space_of(const Value& value) {
    return value.is_binary() && value.get_binary().has_subtype() ? &spaces[value.get_binary().subtype()] : nullptr;
  }

  Arguments arguments(const Node& node, size_t from) {
    Arguments arguments;
    for (size_t i = from; i < node.kids.size(); i++) {
      const auto& kid = node.kids[i];
      if (kid.op == Op::Pair) {
        arguments.named[text_of(value(kid.kids[0]))] = value(kid.kids[1]);
      } else {
        arguments.list.push_back(value(kid));
      }
    }
    return arguments;
  }

  /// Returns a variable or a part of one without copying it, which is valid up to the next change of a variable; or else keeps the value in
  /// `own`.
  const Value& look(const Node& node, Value& own) {
    const auto& kids = node.kids;
    if (node.op == Op::Constant) return node.value;
    if (const auto* found = node.op == Op::Name ? variable(node.text) : nullptr) return *found;
    if (node.op != Op::Item) return own = value(node);
    Value computed;
    const auto key = value(kids[1]);
    const auto& whole = look(kids[0], computed);
    const auto* space = space_of(whole);
    if (whole.is_discarded()) throw UsageError("'{}' is undefined", kids[0].op == Op::Item ? text_of(kids[0].kids[1].value) : kids[0].text);
    const auto* found = find(space != nullptr ? *space : whole, key);
    const bool method = (node.text == "." || found == nullptr) && key.is_string() && has_method(whole, text_of(key));
    if (found != nullptr && !method && (space != nullptr || &whole != &computed)) return *found;
    return own = method ? Value::binary({}) : found != nullptr ? Value(*found) : item_of(whole, key);
  }

  Value value(const Node& node) {
    const auto& kids = node.kids;
    Value own;
    switch (node.op) {
      case Op::Name:
        if (const auto* found = variable(node.text)) return *found;
        return macros.contains(node.text) || node.text == "strftime_now" ? Value::binary({}) : Value(Value::value_t::discarded);
      case Op::Written:
        return written([&] { run(kids[0]); });
      case Op::List:
        return arguments(node, 0).list;
      case Op::Dict:
        return arguments(node, 0).named;
      case Op::If:
        if (truth(look(kids[0], own))) return value(kids[1]);
        return kids.size() > 2 ? value(kids[2]) : Value(Value::value_t::discarded);
      case Op::And:
      case Op::Or:
        own = value(kids[0]);
        return truth(own) == (node.op == Op::And) ? value(kids[1]) : own;
      case Op::Call:
        return called(kids[0], arguments(node, 1));
      case Op::Apply:
        if (kids.size() > 1) own = value(kids[0]);
        if (const auto others = arguments(node, 1); kids.size() > 1) return applied(node.text, own, others);
        return applied(node.text, look(kids[0], own), {});
      default:
        const auto& found = look(node, own);
        return &found == &own ? std::move(own) : found;
    }
  }

  Value called(const Node& function, const Arguments& given) {
    const auto& name = function.op == Op::Item ? text_of(function.kids[1].value) : function.text;
    if (function.op == Op::Item) {
      Value own;
      const auto& self = look(function.kids[0], own);
      if (!has_method(self, name)) throw UsageError("'{}' is not a method of {}", name, self.type_name());
      return filtered(name, self, given);
    }
    if (const auto found = macros.find(name); found != macros.end()) return written_by(*found->second, given);
    auto result = jinja::called(name, given);
    if (name == "namespace") {
      spaces.push_back(std::move(result));
      return Value::binary({}, spaces.size() - 1);
    }
    if (result.is_discarded()) throw UsageError("there is no function '{}'", name);
    return result;
  }

  std::string written_by(const Node& macro, const Arguments& given) {
    const auto count = macro.kids.size() - 1;
    if (given.list.size() > count) throw UsageError("{}() gets {} arguments", macro.text, given.list.size());
    if (++calls > kMostCalls) throw UsageError("{}() calls itself too often", macro.text);
    auto text = written([&] {
      in_scope(&globals, [&] {
        for (size_t i = 0; i < count; i++) {
          const auto& parameter = macro.kids[i];
          const auto name = parameter.op == Op::Pair ? text_of(parameter.kids[0].value) : parameter.text;
          const auto argument = given.at(i, name.c_str());
          scope->variables[name] = argument.is_discarded() && parameter.op == Op::Pair ? value(parameter.kids[1]) : argument;
        }
        return run(macro.kids.back());
      });
    });
    calls--;
    return text;
  }

  void assign(const Node& target, const Value& value) {
    if (target.op == Op::Name) {
      scope->variables[target.text] = value;
    } else if (target.op == Op::Pair) {
      const auto* name = variable(target.kids[0].text);
      auto* space = name == nullptr ? nullptr : space_of(*name);
      if (space == nullptr) throw UsageError("'{}' is not a namespace", target.kids[0].text);
      (*space)[target.text] = value;
    } else {
      const auto list = list_of(value);
      if (list.size() != target.kids.size()) throw UsageError("{} names get {} values", target.kids.size(), list.size());
      for (size_t i = 0; i < list.size(); i++) assign(target.kids[i], list[i]);
    }
  }

  Flow run(const Node& node) {
    const auto& kids = node.kids;
    Value own;
    if (node.line > 0) line = node.line;
    switch (node.op) {
      case Op::Text:
        *out += node.text;
        break;
      case Op::Out:
        *out += text_of(value(kids[0]));
        break;
      case Op::Body:
        for (const auto& kid : kids) {
          if (const auto flow = run(kid); flow != Flow::Next) return flow;
        }
        break;
      case Op::If:
        if (truth(look(kids[0], own))) return run(kids[1]);
        return kids.size() > 2 ? run(kids[2]) : Flow::Next;
      case Op::For:
        return loop(node);
      case Op::Set:
        assign(kids[0], value(kids[1]));
        break;
      case Op::Macro:
        macros[node.text] = &node;
        break;
      case Op::Generation: {
        const auto begin = out->size();
        const auto flow = in_scope(scope, [&] { return run(kids[0]); });
        if (out == &rendered.text) rendered.generated.push_back({begin, out->size()});
        return flow;
      }
      default:
        return node.op == Op::Break ? Flow::Break : Flow::Continue;
    }
    return Flow::Next;
  }

  Flow loop(const Node& node) {
    const auto given = list_of(value(node.kids[1]));
    auto all = Value::array();
    for (const auto& item : given) {
      in_scope(scope, [&] {
        assign(node.kids[0], item);
        if (truth(value(node.kids[2]))) all.push_back(item);
        return Flow::Next;
      });
    }
    const auto count = all.size();
    for (size_t i = 0; i < count; i++) {
      const auto begin = out->size();
      const auto flow = in_scope(scope, [&] {
        scope->variables["loop"] = {
            {"index", i + 1},         {"index0", i},    {"revindex", count - i}, {"revindex0", count - i - 1}, {"first", i == 0},
            {"last", i + 1 == count}, {"length", count}};
        if (i > 0) scope->variables["loop"]["previtem"] = all[i - 1];
        if (i + 1 < count) scope->variables["loop"]["nextitem"] = all[i + 1];
        assign(node.kids[0], all[i]);
        return run(node.kids[3]);
      });
      const auto number = all[i].is_object() ? all[i].value(kNumber, Value()) : Value();
      if (out == &rendered.text && out->size() > begin && number.is_number_unsigned() && number.get<size_t>() < rendered.turns.size())
        rendered.turns[number.get<size_t>()].push_back({begin, out->size()});
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
  run.globals.variables = variables;
  auto& messages = run.globals.variables["messages"];
  for (size_t i = 0; i < messages.size(); i++) {
    if (messages[i].is_object()) messages[i][kNumber] = i;
  }
  run.rendered.turns.resize(messages.size());
  try {
    run.run(program_->all);
  } catch (const UsageError& error) {
    throw UsageError("line {}: {}", run.line, error.what());
  }
  return std::move(run.rendered);
}

}  // namespace tessera::llm::jinja
