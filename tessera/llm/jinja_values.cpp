#include "tessera/llm/jinja_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/data/unicode.h"

namespace tessera::llm::jinja {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kDeepestValue = 200;

bool is_blank(char32_t character) {
  return data::is_white(character) || (character >= 0x1C && character <= 0x1F);
}

std::string repr_of_text(const std::string& text) {
  const char quote = text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const auto character : data::characters_of(text)) {
    const auto code = static_cast<uint32_t>(character);
    constexpr std::string_view escaped = "\t\n\r\\", letters = "tnr\\";
    if (const auto known = code < 0x80 ? escaped.find(static_cast<char>(code)) : std::string::npos; known != std::string::npos) {
      out += {'\\', letters[known]};
    } else if (character == static_cast<char32_t>(quote)) {
      out += {'\\', quote};
    } else if (character == U' ' || !(data::is_control(character) || data::is_space(character))) {
      out += data::to_utf8({&character, 1});
    } else {
      out += code < 0x100     ? fmt::format("\\x{:02x}", code)
             : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                              : fmt::format("\\U{:08x}", code);
    }
  }
  return out + quote;
}

Value value_at(const Json& json, int depth) {
  if (depth > kDeepestValue) throw UsageError("it has lists in lists, more than {} deep", kDeepestValue);
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_string()) return json.get_ref<const std::string&>();
  if (json.is_array()) {
    List list;
    for (const auto& item : json) list.push_back(value_at(item, depth + 1));
    return list;
  }
  if (!json.is_object()) return nullptr;
  Dict dict;
  for (const auto& [key, item] : json.items()) dict.emplace_back(key, value_at(item, depth + 1));
  return dict;
}

/// Writes lists and dicts as Python does: as json.dumps(), or as str().
struct Writer {
  std::string comma = ", ", colon = ": ", indent = {};
  bool json = true, ascii = false, sorted = false;

  std::string line(int depth) const {
    std::string text = indent.empty() ? "" : "\n";
    for (int i = 0; !indent.empty() && i < depth; i++) text += indent;
    return text;
  }
  std::string leaf(const std::string& text) const { return json ? Json(text).dump(-1, ' ', ascii) : repr_of_text(text); }
  std::string write(const Value& value, int depth = 0) const {
    if (const auto* text = value.text()) return leaf(*text);
    const auto* flag = value.as<bool>();
    if (json && (flag != nullptr || value.is_none())) return flag == nullptr ? "null" : *flag ? "true" : "false";
    const auto* list = value.list();
    const auto* dict = value.dict();
    if (list == nullptr && dict == nullptr) {
      if (!number(value) && !value.is_none()) throw UsageError("{} can't be written", kind_of(value));
      return text_of(value);
    }
    std::vector<std::string> parts;
    for (const auto& item : list != nullptr ? *list : List()) parts.push_back(write(item, depth + 1));
    auto items = dict != nullptr ? *dict : Dict();
    if (sorted) std::ranges::sort(items, {}, &Dict::value_type::first);
    for (const auto& [key, item] : items) parts.push_back(leaf(key) + colon + write(item, depth + 1));
    const auto inside = parts.empty() ? "" : line(depth + 1) + joined(parts, comma + line(depth + 1)) + line(depth);
    return list != nullptr ? "[" + inside + "]" : "{" + inside + "}";
  }
};

}  // namespace

Value::Value(List list) : AnyValue(std::make_shared<const List>(std::move(list))) {}
Value::Value(Dict dict) : AnyValue(std::make_shared<const Dict>(std::move(dict))) {}
Value::Value(Function function) : AnyValue(std::make_shared<const Function>(std::move(function))) {}

const List* Value::list() const {
  const auto* found = as<std::shared_ptr<const List>>();
  return found == nullptr ? nullptr : found->get();
}
const Dict* Value::dict() const {
  const auto* found = as<std::shared_ptr<const Dict>>();
  return found == nullptr ? nullptr : found->get();
}

Value Arguments::at(size_t place, std::string_view name) const {
  if (place < values.size()) return values[place];
  const auto* found = find(named, name);
  return found == nullptr ? Undefined{std::string(name)} : *found;
}
int64_t Arguments::integer_at(size_t place, std::string_view name, int64_t otherwise) const {
  const auto value = at(place, name);
  return value.as<int64_t>() != nullptr ? *value.as<int64_t>() : otherwise;
}
const std::string& Arguments::text_at(size_t place, std::string_view name) const {
  const auto* found = place < values.size() ? &values[place] : find(named, name);
  if (found == nullptr || found->text() == nullptr) throw UsageError("the argument '{}' must be a text", name);
  return *found->text();
}

Value value_of(const Json& json) {
  return value_at(json, 0);
}

const Value* find(const Dict& dict, std::string_view key) {
  const auto found = std::ranges::find(dict, key, &Dict::value_type::first);
  return found == dict.end() ? nullptr : &found->second;
}

void put(Dict& dict, std::string_view key, Value value) {
  const auto found = std::ranges::find(dict, key, &Dict::value_type::first);
  if (found == dict.end()) {
    dict.emplace_back(key, std::move(value));
  } else {
    found->second = std::move(value);
  }
}

std::optional<double> number(const Value& value) {
  if (const auto* flag = value.as<bool>()) return *flag ? 1 : 0;
  if (const auto* whole = value.as<int64_t>()) return static_cast<double>(*whole);
  if (const auto* real = value.as<double>()) return *real;
  return {};
}

bool truth(const Value& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (const auto known = number(value)) return *known != 0;
  if (const auto* text = value.text()) return !text->empty();
  if (const auto* list = value.list()) return !list->empty();
  if (const auto* dict = value.dict()) return !dict->empty();
  return true;
}

bool same(const Value& left, const Value& right) {
  const auto one = number(left), other = number(right);
  if (one || other) return one == other;
  if (left.index() != right.index()) return false;
  if (const auto* text = left.text()) return *text == *right.text();
  if (const auto* list = left.list()) return std::ranges::equal(*list, *right.list(), same);
  const auto* dict = left.dict();
  if (dict == nullptr) return left.is_undefined() || left.is_none();
  return dict->size() == right.dict()->size() && std::ranges::all_of(*dict, [&](const auto& item) {
           const auto* found = find(*right.dict(), item.first);
           return found != nullptr && same(item.second, *found);
         });
}

bool less(const Value& left, const Value& right) {
  const auto one = number(left), other = number(right);
  if (one && other) return *one < *other;
  if (left.text() == nullptr || right.text() == nullptr) throw UsageError("{} and {} have no order", kind_of(left), kind_of(right));
  return *left.text() < *right.text();
}

bool contains(const Value& values, const Value& value) {
  if (const auto* text = values.text()) {
    if (value.text() == nullptr) throw UsageError("{} is looked for in a text", kind_of(value));
    return text->find(*value.text()) != std::string::npos;
  }
  return std::ranges::any_of(items_of(values), [&](const Value& item) { return same(item, value); });
}

std::string text_of(const Value& value) {
  if (value.is_undefined()) return "";
  if (const auto* text = value.text()) return *text;
  if (value.is_none()) return "None";
  if (const auto* flag = value.as<bool>()) return *flag ? "True" : "False";
  if (const auto* whole = value.as<int64_t>()) return std::to_string(*whole);
  if (const auto* real = value.as<double>()) {
    auto text = fmt::format("{}", *real);
    return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
  }
  return Writer{.json = false}.write(value);
}

std::string json_of(const Value& value, const Arguments& options) {
  const auto indent = options.at(1, "indent");
  Writer writer{.ascii = truth(options.at(0, "ensure_ascii")), .sorted = truth(options.at(3, "sort_keys"))};
  if (indent.text() != nullptr) writer.indent = *indent.text();
  if (const auto* width = indent.as<int64_t>()) writer.indent = std::string(static_cast<size_t>(std::max<int64_t>(*width, 0)), ' ');
  if (!writer.indent.empty()) writer.comma = ",";
  if (const auto separators = options.at(2, "separators"); separators.list() != nullptr && separators.list()->size() == 2) {
    writer.comma = text_of(separators.list()->front());
    writer.colon = text_of(separators.list()->back());
  }
  return writer.write(value);
}

List items_of(const Value& value) {
  if (const auto* list = value.list()) return *list;
  List items;
  if (const auto* dict = value.dict()) {
    for (const auto& item : *dict) items.emplace_back(item.first);
  } else if (const auto* text = value.text()) {
    for (const auto character : data::characters_of(*text)) items.emplace_back(data::to_utf8({&character, 1}));
  } else if (!value.is_undefined()) {
    throw UsageError("{} has no items", kind_of(value));
  }
  return items;
}

int64_t length_of(const Value& value) {
  if (const auto* list = value.list()) return std::ssize(*list);
  if (const auto* dict = value.dict()) return std::ssize(*dict);
  if (value.text() != nullptr) return std::ssize(data::characters_of(*value.text()));
  if (value.is_undefined()) return 0;
  throw UsageError("{} has no length", kind_of(value));
}

std::string kind_of(const Value& value) {
  constexpr const char* kinds[] = {"",       "none",   "a truth value", "a number",    "a number",
                                   "a text", "a list", "a dict",        "a namespace", "a function"};
  return value.is_undefined() ? fmt::format("'{}', which is undefined,", value.as<Undefined>()->name) : kinds[value.index()];
}

Value arithmetic(std::string_view sign, const Value& left, const Value& right) {
  const auto one = number(left), other = number(right);
  const auto refuse = [&]() -> Value { throw UsageError("{} {} {} can't be computed", kind_of(left), sign, kind_of(right)); };
  if (one && other) {
    const bool whole = left.as<double>() == nullptr && right.as<double>() == nullptr;
    const auto made = [&](double value) { return whole ? Value(static_cast<int64_t>(value)) : Value(value); };
    if (sign == "+") return made(*one + *other);
    if (sign == "-") return made(*one - *other);
    if (sign == "*") return made(*one * *other);
    if (*other == 0) throw UsageError("a number is divided by 0");
    if (sign == "/") return *one / *other;
    return sign == "//" ? made(std::floor(*one / *other)) : made(*one - *other * std::floor(*one / *other));
  }
  if (sign == "*" && left.text() != nullptr && right.as<int64_t>() != nullptr) {
    std::string out;
    if (*right.as<int64_t>() * std::ssize(*left.text()) > 1 << 20) return refuse();
    for (int64_t i = 0; i < *right.as<int64_t>(); i++) out += *left.text();
    return out;
  }
  if (sign != "+") return refuse();
  if (left.text() != nullptr && right.text() != nullptr) return *left.text() + *right.text();
  if (left.list() == nullptr || right.list() == nullptr) return refuse();
  auto joined = *left.list();
  joined.insert(joined.end(), right.list()->begin(), right.list()->end());
  return joined;
}

Value item_of(const Value& value, const Value& key) {
  if (value.is_undefined()) throw UsageError("'{}' is undefined", value.as<Undefined>()->name);
  if (const auto* dict = value.dict()) {
    const auto* found = key.text() != nullptr ? find(*dict, *key.text()) : nullptr;
    if (found != nullptr) return *found;
  } else if (const auto* at = key.as<int64_t>(); at != nullptr && (value.list() != nullptr || value.text() != nullptr)) {
    const auto items = value.list() != nullptr ? List() : items_of(value);
    const auto& all = value.list() != nullptr ? *value.list() : items;
    const auto place = *at < 0 ? *at + std::ssize(all) : *at;
    if (place >= 0 && place < std::ssize(all)) return all[static_cast<size_t>(place)];
  }
  return Undefined{key.is_undefined() ? "" : text_of(key)};
}

Value slice_of(const Value& value, const Arguments& arguments) {
  if (value.text() == nullptr && value.list() == nullptr) throw UsageError("{} has no slices", kind_of(value));
  const auto items = items_of(value);
  const auto size = std::ssize(items), step = arguments.integer_at(2, "step", 1);
  if (step == 0) throw UsageError("a slice has the step 0");
  const auto place = [&](size_t argument, int64_t otherwise) {
    const auto at = arguments.integer_at(argument, "", otherwise);
    if (argument >= arguments.values.size() || arguments.values[argument].is_none()) return otherwise;
    return std::clamp(at < 0 ? at + size : at, step < 0 ? int64_t{-1} : 0, step < 0 ? size - 1 : size);
  };
  const auto first = place(0, step < 0 ? size - 1 : 0), last = place(1, step < 0 ? -1 : size);
  List out;
  for (auto i = first; step < 0 ? i > last : i < last; i += step) out.push_back(items[static_cast<size_t>(i)]);
  if (value.list() != nullptr) return out;
  std::string text;
  for (const auto& item : out) text += *item.text();
  return text;
}

std::string_view stripped(std::string_view text, Sides sides, const std::string* set) {
  const auto goes = [&](std::string_view character) {
    return set != nullptr ? set->find(character) != std::string::npos : is_blank(data::first_character(character));
  };
  const auto length = [&] { return data::length_of_first(text); };
  while (sides != Sides::Right && !text.empty() && goes(text.substr(0, length()))) text.remove_prefix(length());
  while (sides != Sides::Left && !text.empty() && goes(text.substr(data::last_character(text))))
    text = text.substr(0, data::last_character(text));
  return text;
}

bool is_listed(std::string_view words, std::string_view word) {
  return words.find(fmt::format(" {} ", word)) != std::string_view::npos;
}

}  // namespace tessera::llm::jinja
