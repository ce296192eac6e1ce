// Values of chat templates, which behave as those of Python.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::llm::jinja {

struct Value;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<std::string, Value>>;

struct Undefined {
  std::string name;
};

struct Arguments;
using Function = std::function<Value(const Arguments&)>;

struct Namespace;

using AnyValue = std::variant<Undefined, std::nullptr_t, bool, int64_t, double, std::string, std::shared_ptr<const List>,
                              std::shared_ptr<const Dict>, std::shared_ptr<Namespace>, std::shared_ptr<const Function>>;
struct Value : AnyValue {
  using AnyValue::AnyValue;
  Value(List list);
  Value(Dict dict);
  Value(Function function);

  template <class T>
  const T* as() const {
    return std::get_if<T>(static_cast<const AnyValue*>(this));
  }
  bool is_undefined() const { return index() == 0; }
  bool is_none() const { return index() == 1; }
  const std::string* text() const { return as<std::string>(); }
  const List* list() const;
  const Dict* dict() const;
};

struct Namespace {
  Dict members;
};

struct Arguments {
  List values;
  Dict named;

  /// The argument with this place or name; undefined if it is not given.
  Value at(size_t place, std::string_view name) const;
  int64_t integer_at(size_t place, std::string_view name, int64_t otherwise) const;
  const std::string& text_at(size_t place, std::string_view name) const;
};

Value value_of(const nlohmann::ordered_json& json);
const Value* find(const Dict& dict, std::string_view key);
void put(Dict& dict, std::string_view key, Value value);

bool truth(const Value& value);
bool same(const Value& left, const Value& right);
bool less(const Value& left, const Value& right);
bool contains(const Value& values, const Value& value);
std::optional<double> number(const Value& value);
/// As str() of Python; that of nothing is "".
std::string text_of(const Value& value);
std::string json_of(const Value& value, const Arguments& options);
/// The values of a list, the keys of a dict, the characters of a text.
List items_of(const Value& value);
int64_t length_of(const Value& value);
/// "a text", "a list"
std::string kind_of(const Value& value);
Value arithmetic(std::string_view sign, const Value& left, const Value& right);
/// value[key]; undefined if there is no such item.
Value item_of(const Value& value, const Value& key);
/// The arguments are begin, end and step; none for those that are not given.
Value slice_of(const Value& value, const Arguments& arguments);

enum class Sides { Left = 1, Right = 2, Both = 3 };
/// The text without blanks, or characters of `set`, at its ends, as Python's strip().
std::string_view stripped(std::string_view text, Sides sides, const std::string* set = nullptr);
/// Whether a word is one of those in a text that begins and ends with a blank.
bool is_listed(std::string_view words, std::string_view word);

// jinja_library.cpp
Value filtered(std::string_view name, const Value& value, const Arguments& arguments);
bool tested(std::string_view name, const Value& value, const Arguments& arguments);
/// value.name: a method, or else an item.
Value attribute_of(const Value& value, const std::string& name);
/// The method of a value; undefined if it has none of this name.
Value method_of(const Value& value, const std::string& name);
Dict global_functions();

}  // namespace tessera::llm::jinja
