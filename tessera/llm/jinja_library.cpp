// The functions, filters, tests and methods of chat templates.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/unicode.h"
#include "tessera/llm/jinja_values.h"

namespace tessera::llm::jinja {
namespace {

constexpr std::string_view kTextMethods = " capitalize endswith find join lower lstrip replace rstrip split startswith strip upper ";
constexpr std::string_view kDictMethods = " copy get items keys values ";
constexpr int64_t kLongestRange = 100'000;  // as in Jinja's sandbox

std::string in_lower(const std::string& text) {
  return data::to_utf8(data::in_lower_case(data::characters_of(text)));
}

Value at_path(Value value, const Value& path) {
  if (path.is_undefined() || path.is_none()) return value;
  if (path.text() == nullptr) return item_of(value, path);
  for (auto rest = *path.text(); !rest.empty();) {
    const auto dot = std::min(rest.find('.'), rest.size());
    value = item_of(value, rest.substr(0, dot));
    rest = rest.substr(std::min(dot + 1, rest.size()));
  }
  return value;
}

Value pairs_of(const Value& value) {
  if (value.is_undefined()) return List();
  if (value.dict() == nullptr) throw UsageError("{} has no keys and values", kind_of(value));
  List pairs;
  for (const auto& [key, item] : *value.dict()) pairs.push_back(List{key, item});
  return pairs;
}

/// As int() of Python; `otherwise` for a text that is no number.
Value whole_number(const Value& value, const Value& otherwise) {
  auto known = number(value);
  if (value.text() != nullptr) {
    const auto bare = stripped(*value.text(), Sides::Both);
    if (const auto exact = number_of<int64_t>(bare)) return *exact;
    known = number_of<double>(bare);
  }
  return known && std::isfinite(*known) ? Value(static_cast<int64_t>(*known)) : otherwise;
}

std::string joined_items(const List& items, const std::string& between, const Value& path) {
  std::string out;
  for (size_t i = 0; i < items.size(); i++) out += (i > 0 ? between : "") + text_of(at_path(items[i], path));
  return out;
}

/// At a separator, or at blanks.
List split(std::string_view text, const std::string* separator, int64_t times) {
  List parts;
  if (separator != nullptr && separator->empty()) throw UsageError("split() gets an empty separator");
  for (;; times--) {
    if (separator == nullptr) text = stripped(text, Sides::Left);
    if (separator == nullptr && text.empty()) return parts;
    size_t end = separator != nullptr ? text.find(*separator) : 0;
    while (separator == nullptr && end < text.size() && stripped(text.substr(end), Sides::Left).size() == text.size() - end) end++;
    if (times == 0 || end >= text.size()) return parts.emplace_back(std::string(text)), parts;
    parts.emplace_back(std::string(text.substr(0, end)));
    text.remove_prefix(end + (separator != nullptr ? separator->size() : 0));
  }
}

Value replaced(std::string_view text, std::string_view from, std::string_view to, int64_t times) {
  std::string out;
  if (from.empty()) throw UsageError("replace() looks for an empty text");
  for (size_t found = 0; times-- != 0 && (found = text.find(from)) != std::string::npos; text.remove_prefix(found + from.size()))
    out.append(text.substr(0, found)).append(to);
  return out.append(text);
}

std::string indented(const std::string& text, const Arguments& arguments) {
  const auto width = arguments.at(0, "width");
  const auto indent = width.text() != nullptr ? *width.text() : std::string(static_cast<size_t>(arguments.integer_at(0, "width", 4)), ' ');
  const std::string line_break = "\n";
  std::string out = truth(arguments.at(1, "first")) ? indent : "";
  for (size_t i = 0; const auto& line : split(text, &line_break, -1))
    out += (i++ == 0 ? "" : line_break + (line.text()->empty() ? "" : indent)) + *line.text();
  return out;
}

/// Sorts, or leaves only the first of the same values.
List ordered(List items, const Arguments& arguments, const Value& path, bool distinct) {
  const auto key = [&](const Value& item) {
    auto value = at_path(item, path);
    return value.text() != nullptr && !truth(arguments.at(distinct ? 0 : 1, "case_sensitive")) ? Value(in_lower(*value.text())) : value;
  };
  if (!distinct) {
    const bool down = truth(arguments.at(0, "reverse"));
    std::ranges::stable_sort(items, [&](const Value& a, const Value& b) { return down ? less(key(b), key(a)) : less(key(a), key(b)); });
    return items;
  }
  List found;
  for (const auto& item : items) {
    if (std::ranges::none_of(found, [&](const Value& other) { return same(key(item), key(other)); })) found.push_back(item);
  }
  return found;
}

/// map, select, reject, selectattr, rejectattr: the first values of `arguments` are an attribute, or the name of a filter or test.
List each(std::string_view name, const Value& value, Arguments arguments) {
  const auto attribute = arguments.at(0, "attribute"), otherwise = arguments.at(9, "default");
  const bool maps = name == "map", by_attribute = name.ends_with("attr") || (maps && arguments.values.empty());
  auto& rest = arguments.values;
  if (by_attribute && !rest.empty()) rest.erase(rest.begin());
  const auto function = rest.empty() ? std::string() : text_of(rest.front());
  if (!rest.empty()) rest.erase(rest.begin());
  List out;
  if (value.is_none()) return out;
  for (const auto& item : items_of(value)) {
    auto given = by_attribute ? at_path(item, attribute) : item;
    if (given.is_undefined() && maps && by_attribute && !otherwise.is_undefined()) given = otherwise;
    if (maps) {
      out.push_back(by_attribute ? given : filtered(function, given, arguments));
    } else if ((function.empty() ? truth(given) : tested(function, given, arguments)) != name.starts_with("reject")) {
      out.push_back(item);
    }
  }
  return out;
}

Value text_method(const std::string& text, std::string_view name, const Arguments& arguments) {
  const auto first = arguments.at(0, "first");
  if (name.ends_with("strip"))
    return std::string(stripped(text, name[0] == 'l' ? Sides::Left : name[0] == 'r' ? Sides::Right : Sides::Both, first.text()));
  if (name == "split") return split(text, arguments.at(0, "sep").text(), arguments.integer_at(1, "maxsplit", -1));
  if (name == "startswith") return text.starts_with(arguments.text_at(0, "prefix"));
  if (name == "endswith") return text.ends_with(arguments.text_at(0, "suffix"));
  if (name == "find") {
    const auto at = text.find(arguments.text_at(0, "sub"));
    return at == std::string::npos ? int64_t{-1} : std::ssize(data::characters_of(text.substr(0, at)));
  }
  if (name == "join") return joined_items(items_of(first), text, Undefined{});
  return filtered(name, text, arguments);
}

Value dict_method(const Value& dict, std::string_view name, const Arguments& arguments) {
  if (name == "copy") return dict;
  if (name == "items") return pairs_of(dict);
  if (name == "keys") return items_of(dict);
  if (name == "get") {
    const auto* found = find(*dict.dict(), text_of(arguments.at(0, "key")));
    const auto otherwise = arguments.at(1, "default");
    return found != nullptr ? *found : otherwise.is_undefined() ? Value(nullptr) : otherwise;
  }
  List values;
  for (const auto& item : *dict.dict()) values.push_back(item.second);
  return values;
}

}  // namespace

Value filtered(std::string_view name, const Value& value, const Arguments& arguments) {
  const auto first = arguments.at(0, "first");
  if (name == "tojson") return json_of(value, arguments);
  if (name == "default" || name == "d") {
    const auto otherwise = arguments.at(0, "default_value");
    if (!value.is_undefined() && (truth(value) || !truth(arguments.at(1, "boolean")))) return value;
    return otherwise.is_undefined() ? Value("") : otherwise;
  }
  if (name == "trim") return std::string(stripped(text_of(value), Sides::Both, first.text()));
  if (name == "length" || name == "count") return length_of(value);
  if (name == "string" || name == "safe") return text_of(value);
  if (name == "upper") return upper(text_of(value));
  if (name == "lower") return in_lower(text_of(value));
  if (name == "capitalize") {
    auto out = in_lower(text_of(value));
    return out.replace(0, 1, upper(out.substr(0, 1)));
  }
  if (name == "replace")
    return replaced(text_of(value), arguments.text_at(0, "old"), arguments.text_at(1, "new"), arguments.integer_at(2, "count", -1));
  if (name == "indent") return indented(text_of(value), arguments);
  if (name == "int") return whole_number(value, first.is_undefined() ? Value(int64_t{0}) : first);
  if (name == "items") return pairs_of(value);
  if (name == "dictsort") return ordered(*pairs_of(value).list(), {}, int64_t{0}, false);
  if (name == "sort") return ordered(items_of(value), arguments, arguments.at(2, "attribute"), false);
  if (name == "unique") return ordered(items_of(value), arguments, arguments.at(1, "attribute"), true);
  if (name == "join") return joined_items(items_of(value), text_of(arguments.at(0, "d")), arguments.at(1, "attribute"));
  if (name == "map" || name.starts_with("select") || name.starts_with("reject")) return each(name, value, arguments);
  if (name == "reverse")
    return slice_of(value.text() != nullptr ? value : Value(items_of(value)), {.values = {nullptr, nullptr, int64_t{-1}}, .named = {}});
  auto items = items_of(value);
  if (name == "list") return items;
  if (name != "first" && name != "last" && name != "min" && name != "max") throw UsageError("the filter '{}' is not supported", name);
  if (items.empty()) return Undefined{std::string(name)};
  if (name == "first" || name == "last") return name == "first" ? items.front() : items.back();
  items = ordered(items, {}, arguments.at(1, "attribute"), false);
  return name == "min" ? items.front() : items.back();
}

bool tested(std::string_view name, const Value& value, const Arguments& arguments) {
  const auto other = arguments.at(0, "other");
  const auto* whole = value.as<int64_t>();
  if (name == "defined" || name == "undefined") return value.is_undefined() == (name == "undefined");
  if (name == "none") return value.is_none();
  if (name == "string") return value.text() != nullptr;
  if (name == "mapping") return value.dict() != nullptr;
  if (name == "iterable" || name == "sequence")
    return value.is_undefined() || value.text() != nullptr || value.list() != nullptr || value.dict() != nullptr;
  if (name == "number") return number(value).has_value();
  if (name == "integer") return whole != nullptr;
  if (name == "in") return contains(other, value);
  if (name == "eq" || name == "equalto" || name == "sameas" || name == "ne") return same(value, other) != (name == "ne");
  const auto* flag = value.as<bool>();
  if (name == "boolean") return flag != nullptr;
  if (name == "true" || name == "false") return flag != nullptr && *flag == (name == "true");
  if (name != "even" && name != "odd" && name != "divisibleby") throw UsageError("the test '{}' is not supported", name);
  const auto by = name == "divisibleby" ? other : Value(int64_t{2});
  return same(arithmetic("%", value, by), int64_t{name == "odd" ? 1 : 0});
}

Value method_of(const Value& value, const std::string& name) {
  if (value.text() != nullptr && is_listed(kTextMethods, name))
    return Function([text = *value.text(), name](const Arguments& arguments) { return text_method(text, name, arguments); });
  if (value.dict() != nullptr && is_listed(kDictMethods, name))
    return Function([value, name](const Arguments& arguments) { return dict_method(value, name, arguments); });
  return Undefined{name};
}

Value attribute_of(const Value& value, const std::string& name) {
  if (const auto* space = value.as<std::shared_ptr<Namespace>>()) {
    const auto* found = find((*space)->members, name);
    return found == nullptr ? Undefined{name} : *found;
  }
  auto method = method_of(value, name);
  return method.is_undefined() ? item_of(value, name) : method;
}

Dict global_functions() {
  const auto dict = [](const Arguments& arguments) {
    auto made = arguments.values.empty() || arguments.values.front().dict() == nullptr ? Dict() : *arguments.values.front().dict();
    for (const auto& [name, value] : arguments.named) put(made, name, value);
    return made;
  };
  return {{"namespace", Function([dict](const Arguments& arguments) { return std::make_shared<Namespace>(dict(arguments)); })},
          {"dict", Function(dict)},
          {"range", Function([](const Arguments& arguments) {
             const bool one = arguments.values.size() == 1;
             const auto begin = one ? 0 : arguments.integer_at(0, "start", 0), end = arguments.integer_at(one ? 0 : 1, "stop", 0);
             const auto step = arguments.integer_at(2, "step", 1);
             if (step == 0 || (end - begin) / step > kLongestRange) throw UsageError("range() is too long");
             List list;
             for (auto i = begin; step < 0 ? i > end : i < end; i += step) list.emplace_back(i);
             return list;
           })},
          {"raise_exception",
           Function([](const Arguments& arguments) -> Value { throw UsageError("{}", text_of(arguments.at(0, "message"))); })},
          {"strftime_now", Function([](const Arguments& arguments) {
             const auto now = std::time(nullptr);
             std::tm local{};
             ::localtime_r(&now, &local);
             char text[256];
             return std::string(text, std::strftime(text, sizeof text, arguments.text_at(0, "format").c_str(), &local));
           })}};
}

}  // namespace tessera::llm::jinja
