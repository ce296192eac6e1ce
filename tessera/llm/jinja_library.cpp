// The operators, filters, tests, methods and functions of chat templates.
#include <algorithm>
#include <cmath>
#include <ctime>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/unicode.h"
#include "tessera/llm/jinja_values.h"

namespace tessera::llm::jinja {
namespace {

constexpr int64_t kLongestRange = 100'000;  // as in Jinja's sandbox

/// The item that a text such as "function.name" leads to.
Value at_path(Value value, const Value& path) {
  if (path.is_number()) return item_of(value, path);
  for (auto rest = text_of(path); !rest.empty();) {
    const auto dot = std::min(rest.find('.'), rest.size());
    value = item_of(value, rest.substr(0, dot));
    rest.erase(0, dot + 1);
  }
  return value;
}

int64_t integer(const Value& value, int64_t otherwise) {
  return value.is_number() ? value.get<int64_t>() : otherwise;
}

Value in_lower(const Value& value) {
  return value.is_string() ? Value(data::to_utf8(data::in_lower_case(data::characters_of(value.get<std::string>())))) : value;
}

/// At a separator, or at blanks.
Value split(const std::string& text, const Value& separator, const Value& times) {
  auto parts = Value::array();
  size_t begin = 0;
  for (auto left = integer(times, -1);; left--) {
    const auto at = separator.is_string() ? text.find(text_of(separator), begin) : text.find_first_of(" \t\n\r\v\f", begin);
    const auto end = left == 0 ? std::string::npos : at;
    if (separator.is_string() || begin < std::min(end, text.size())) parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + (separator.is_string() ? text_of(separator).size() : 1);
  }
}

std::string joined_items(const Value& list, const std::string& between, const Value& path = {}) {
  std::string out;
  for (size_t i = 0; i < list.size(); i++) out += (i > 0 ? between : "") + text_of(path.is_null() ? list[i] : at_path(list[i], path));
  return out;
}

std::string indented(const std::string& text, const Value& width, bool first) {
  const auto indent = width.is_string() ? width.get<std::string>() : std::string(static_cast<uint8_t>(integer(width, 4)), ' ');
  std::string out = first ? indent : "";
  for (size_t i = 0; const auto& line : split(text, "\n", {})) {
    const auto part = text_of(line);
    out += (i++ == 0 ? "" : part.empty() ? "\n" : "\n" + indent) + part;
  }
  return out;
}

bool less(const Value& left, const Value& right) {
  if (!(left.is_number() && right.is_number()) && !(left.is_string() && right.is_string()))
    throw UsageError("{} and {} have no order", left.type_name(), right.type_name());
  return left < right;
}

bool same(const Value& left, const Value& right) {
  if (left.is_object() && right.is_object() && left.contains(kNumber) && right.contains(kNumber)) {
    auto one = left, other = right;
    one[kNumber] = other[kNumber] = 0;
    return one == other;
  }
  return left == right || (left.is_discarded() && right.is_discarded());
}

bool contains(const Value& values, const Value& value) {
  if (!values.is_string()) return std::ranges::any_of(list_of(values), [&](const Value& item) { return same(item, value); });
  if (!value.is_string()) throw UsageError("{} is looked for in a text", value.type_name());
  return values.get_ref<const std::string&>().find(value.get_ref<const std::string&>()) != std::string::npos;
}

/// Sorts by an attribute, without regard to case.
Value ordered(Value list, const Value& path) {
  const auto key = [&](const Value& item) { return in_lower(path.is_null() ? item : at_path(item, path)); };
  std::ranges::stable_sort(list.get_ref<Value::array_t&>(), [&](const Value& a, const Value& b) { return less(key(a), key(b)); });
  return list;
}

/// map, select, reject, selectattr, rejectattr: the first arguments are an attribute, or the name of a filter or test.
Value each(std::string_view name, const Value& value, Arguments arguments) {
  const auto attribute = arguments.at(0, "attribute");
  const bool maps = name == "map", by_attribute = name.ends_with("attr") || (maps && arguments.list.empty());
  if (by_attribute && !maps) arguments.list.erase(arguments.list.begin());
  const auto function = text_of(arguments.at(0));
  if (!function.empty()) arguments.list.erase(arguments.list.begin());
  auto out = Value::array();
  for (const auto& item : value.is_null() ? out : list_of(value)) {
    const auto given = by_attribute ? at_path(item, attribute) : item;
    if (maps) {
      out.push_back(by_attribute ? given : applied("|" + function, given, arguments));
    } else if (truth(function.empty() ? given : applied("is " + function, given, arguments)) != name.starts_with("reject")) {
      out.push_back(item);
    }
  }
  return out;
}

/// value[begin:end:step]
Value slice_of(const Value& value, const Arguments& arguments) {
  const auto list = list_of(value);
  const auto size = static_cast<int64_t>(list.size()), step = integer(arguments.at(2), 1);
  const auto first = step < 0 ? size - 1 : 0, last = step < 0 ? -1 : size;
  if (step == 0) throw UsageError("a slice has the step 0");
  const auto place = [&](size_t number, int64_t otherwise) {
    if (!arguments.at(number).is_number()) return otherwise;
    const auto at = integer(arguments.at(number), 0);
    return std::clamp(at < 0 ? at + size : at, std::min(first, last), std::max(first, last));
  };
  const auto end = place(1, last);
  auto out = Value::array();
  for (auto i = place(0, first); step < 0 ? i > end : i < end; i += step) out.push_back(list[static_cast<size_t>(i)]);
  return value.is_string() ? Value(joined_items(out, "")) : out;
}

Value arithmetic(std::string_view sign, const Value& left, const Value& right) {
  if (left.is_number() && right.is_number()) {
    const auto one = left.get<double>(), other = right.get<double>(), floor = std::floor(one / other);
    if (other == 0 && is_listed(" / // % ", sign)) throw UsageError("a number is divided by 0");
    const auto result = sign == "+"    ? one + other
                        : sign == "-"  ? one - other
                        : sign == "*"  ? one * other
                        : sign == "/"  ? one / other
                        : sign == "//" ? floor
                                       : one - other * floor;
    return sign == "/" || left.is_number_float() || right.is_number_float() ? Value(result) : Value(static_cast<int64_t>(result));
  }
  if (sign == "*" && left.is_string() && right.is_number_integer() && right >= 0 && right < kLongestRange && text_of(left).size() < 100)
    return joined_items(Value::array_t(right.get<size_t>() + 1, ""), text_of(left));
  if (sign != "+" || left.type() != right.type() || !(left.is_string() || left.is_array()))
    throw UsageError("{} {} {} can't be computed", left.type_name(), sign, right.type_name());
  if (left.is_string()) return text_of(left) + text_of(right);
  auto joined = left;
  joined.insert(joined.end(), right.begin(), right.end());
  return joined;
}

bool tested(std::string_view name, const Value& value, const Value& other) {
  if (name == "undefined") return value.is_discarded();
  if (name == "defined") return !value.is_discarded();
  if (name == "none") return value.is_null();
  if (name == "string") return value.is_string();
  if (name == "mapping") return value.is_object();
  if (name == "iterable" || name == "sequence") return value.is_string() || value.is_structured() || value.is_discarded();
  if (name == "number") return value.is_number() || value.is_boolean();
  if (name == "boolean") return value.is_boolean();
  if (name == "true" || name == "false") return value == Value(name == "true");
  if (name == "in") return contains(other, value);
  if (name == "equalto" || name == "eq") return same(value, other);
  throw UsageError("the test '{}' is not supported", name);
}

}  // namespace

bool has_method(const Value& value, std::string_view name) {
  return (value.is_object() && is_listed(" get items keys values ", name)) ||
         (value.is_string() && is_listed(" capitalize endswith join lower lstrip replace rstrip split startswith strip upper ", name));
}

Value filtered(std::string_view name, const Value& value, const Arguments& arguments) {
  const auto first = arguments.at(0), second = arguments.at(1);
  if (name == "trim" || name.ends_with("strip")) return std::string(stripped(text_of(value), name, first));
  if (name == "lower") return in_lower(text_of(value));
  if (name == "upper") return upper(text_of(value));
  if (name == "capitalize" || name == "title") {
    auto text = text_of(in_lower(text_of(value)));
    for (size_t i = 0; i < (name == "title" ? text.size() : std::min<size_t>(text.size(), 1)); i++) {
      if (i == 0 || std::string_view("- \t\n\v\f\r({[<").find(text[i - 1]) != std::string_view::npos) text.replace(i, 1, upper(text.substr(i, 1)));
    }
    return text;
  }
  if (name == "string" || name == "safe") return text_of(value);
  if (name == "int") {
    const auto number = Value::parse(stripped(text_of(value)), nullptr, /*allow_exceptions=*/false);
    return number.is_number() ? static_cast<int64_t>(number.get<double>()) : 0;
  }
  if (name == "tojson") return json_of(value, arguments);
  if (name == "indent") return indented(text_of(value), arguments.at(0, "width"), truth(arguments.at(1, "first")));
  if (name == "startswith") return text_of(value).starts_with(text_of(first));
  if (name == "endswith") return text_of(value).ends_with(text_of(first));
  if (name == "split" && first != "") return split(text_of(value), first, arguments.at(1, "maxsplit"));
  if (name == "replace" && first != "") return joined_items(split(text_of(value), first, arguments.at(2, "count")), text_of(second));
  if (name == "default") return value.is_discarded() || (!truth(value) && truth(arguments.at(1, "boolean"))) ? first : value;
  if (name == "get") {
    const auto found = item_of(value, first);
    return !found.is_discarded() ? found : second.is_discarded() ? arguments.named.value("default", Value()) : second;
  }
  if (name == "map" || name.starts_with("select") || name.starts_with("reject")) return each(name, value, arguments);
  if (name == "join" && value.is_string()) return joined_items(list_of(first), text_of(value));
  auto list = list_of(value);
  if (name == "length") return list.size();
  if (name == "list" || name == "keys") return list;
  if (name == "join") return joined_items(list, text_of(first), arguments.at(1, "attribute"));
  if (name == "sort") return ordered(list, arguments.at(2, "attribute"));
  if (name == "last") return item_of(list, -1);
  if (name == "min" || name == "first") return item_of(name == "min" ? ordered(list, {}) : list, 0);
  if (name == "unique") {
    auto found = Value::array();
    for (const auto& item : list) {
      if (!contains(found, item)) found.push_back(item);
    }
    return found;
  }
  if (!is_listed(" items dictsort values ", name) || value.is_array() || value.is_string())
    throw UsageError("the filter or method '{}' is not supported, for {}", name, value.type_name());
  for (auto& key : list) key = name == "values" ? value[text_of(key)] : Value::array({key, value[text_of(key)]});
  return name == "dictsort" ? ordered(list, 0) : list;
}

Value applied(std::string_view name, const Value& value, const Arguments& arguments) {
  const auto other = arguments.at(0);
  if (name.starts_with('|')) return filtered(name.substr(1), value, arguments);
  if (name.starts_with("is ")) return tested(name.substr(3), value, other);
  if (name == "slice") return slice_of(value, arguments);
  if (name == "not") return !truth(value);
  if (name == "==" || name == "!=") return same(value, other) == (name == "==");
  if (name == "in" || name == "not in") return contains(other, value) == (name == "in");
  if (name == "<" || name == ">=") return less(value, other) == (name == "<");
  if (name == ">" || name == "<=") return less(other, value) == (name == ">");
  return name == "~" ? Value(text_of(value) + text_of(other)) : arithmetic(name, value, other);
}

Value called(std::string_view name, const Arguments& arguments) {
  const auto first = arguments.at(0);
  if (name == "namespace" || name == "dict") {
    auto made = first.is_object() ? first : Value::object();
    made.update(arguments.named);
    return made;
  }
  if (name == "raise_exception") throw UsageError("{}", text_of(first));
  if (name == "range") {
    const bool one = arguments.list.size() == 1;
    const auto begin = one ? 0 : integer(first, 0), end = integer(arguments.at(one ? 0 : 1), 0), step = integer(arguments.at(2), 1);
    if (step == 0 || (end - begin) / step > kLongestRange) throw UsageError("range() is too long");
    auto list = Value::array();
    for (auto i = begin; step < 0 ? i > end : i < end; i += step) list.push_back(i);
    return list;
  }
  if (name != "strftime_now") return Value::value_t::discarded;
  const auto now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char text[256];
  return std::string(text, std::strftime(text, sizeof text, text_of(first).c_str(), &local));
}

}  // namespace tessera::llm::jinja
