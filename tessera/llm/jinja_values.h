// The tree of a parsed chat template, and its values: JSON that behaves as in Python.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::llm::jinja {

/// An undefined value is discarded; a method that is not called is binary.
using Value = nlohmann::ordered_json;

constexpr auto kNumber = "\x01";  // a message has its number under this key, which templates do not see

/// A statement or an expression.
struct Node {
  enum class Op {
    Text,
    Out,
    Body,
    If,
    For,
    Set,
    Written,
    Macro,
    Generation,
    Break,
    Continue,
    Constant,
    Name,
    List,
    Dict,
    Pair,
    And,
    Or,
    Item,
    Call,
    Apply
  };

  Op op = Op::Body;
  std::string text = {};  // of the template, a name, or what is applied: "+", "|trim", "is defined"
  std::vector<Node> kids = {};
  int line = 0;
  Value value = {};  // of a constant
};

/// Parses with trim_blocks and lstrip_blocks, as transformers sets them. Throws ConfigError with the line.
Node parsed(std::string_view text);

struct Arguments {
  Value list = Value::array(), named = Value::object();

  /// The argument with this place or name; undefined if it is not given.
  Value at(size_t place, const char* name = kNumber) const;
};

bool truth(const Value& value);
/// As str() of Python; that of an undefined value is "".
std::string text_of(const Value& value);
std::string json_of(const Value& value, const Arguments& options);
/// A list of the values of a list, the keys of a dict, the characters of a text.
Value list_of(const Value& value);
const Value* find(const Value& value, const Value& key);
/// Returns value[key], or an undefined value if the key is missing.
Value item_of(const Value& value, const Value& key);

/// As Python's strip(), lstrip() or rstrip(): the text without blanks, or characters of `set`, at its ends.
std::string_view stripped(std::string_view text, std::string_view method = "strip", const Value& set = {});
/// Whether a word is one of those in a text that begins and ends with a blank.
bool is_listed(std::string_view words, std::string_view word);

bool has_method(const Value& value, std::string_view name);
/// A filter or a method of a text, list or dict.
Value filtered(std::string_view name, const Value& value, const Arguments& arguments);
/// Applies an operator, a filter or a test.
Value applied(std::string_view name, const Value& value, const Arguments& arguments);
/// A function of the name; undefined if there is none.
Value called(std::string_view name, const Arguments& arguments);

}  // namespace tessera::llm::jinja
