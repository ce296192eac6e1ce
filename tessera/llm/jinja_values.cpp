#include "tessera/llm/jinja_values.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/data/unicode.h"

namespace tessera::llm::jinja {
namespace {

constexpr auto kUndefined = Value::value_t::discarded;

std::string repr_of_text(const std::string& text) {
  const char quote = text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const auto character : data::characters_of(text)) {
    constexpr std::u32string_view escaped = U"\t\n\r\\";
    if (const auto known = escaped.find(character); known != std::string::npos) {
      out += {'\\', "tnr\\"[known]};
    } else if (character == static_cast<char32_t>(quote)) {
      out += {'\\', quote};
    } else if (character == U' ' || !(data::is_control(character) || data::is_space(character))) {
      out += data::to_utf8({&character, 1});
    } else {
      const auto code = static_cast<uint32_t>(character);
      out += code < 0x100     ? fmt::format("\\x{:02x}", code)
             : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                              : fmt::format("\\U{:08x}", code);
    }
  }
  return out + quote;
}

/// Writes values as Python does: as json.dumps(), or as str().
struct Writer {
  std::string comma = ", ", colon = ": ", indent = {};
  bool json = true, ascii = false, sorted = false;

  std::string write(const Value& value, const std::string& line = "\n") const {
    if (value.is_string()) return json ? value.dump(-1, ' ', ascii) : repr_of_text(value.get<std::string>());
    if (!json && value.is_null()) return "None";
    if (!json && value.is_boolean()) return value.get<bool>() ? "True" : "False";
    if (value.is_binary() || value.is_discarded())
      throw UsageError("what is {} can't be written", value.is_binary() ? "a method" : "undefined");
    if (value.is_number_float()) {
      auto text = fmt::format("{}", value.get<double>());
      return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
    }
    if (!value.is_structured()) return value.dump();
    auto keys = list_of(value);
    if (sorted && value.is_object()) std::sort(keys.get_ref<Value::array_t&>().begin(), keys.get_ref<Value::array_t&>().end());
    const auto inner = indent.empty() ? "" : line + indent;
    std::string out;
    for (const auto& key : keys) {
      out += (out.empty() ? "" : comma) + inner;
      out += value.is_object() ? write(key) + colon + write(*find(value, key), inner) : write(key, inner);
    }
    if (!keys.empty() && !indent.empty()) out += line;
    return value.is_object() ? "{" + out + "}" : "[" + out + "]";
  }
};

}  // namespace

Value Arguments::at(size_t place, const char* name) const {
  return place < list.size() ? list[place] : named.value(name, Value(kUndefined));
}

bool truth(const Value& value) {
  return !value.is_discarded() && !value.is_null() && value != false && value != 0 && value != "" && (value.is_binary() || !value.empty());
}

std::string text_of(const Value& value) {
  return value.is_discarded() ? "" : value.is_string() ? value.get<std::string>() : Writer{.json = false}.write(value);
}

std::string json_of(const Value& value, const Arguments& options) {
  const auto indent = options.at(1, "indent"), separators = options.at(2, "separators");
  Writer writer{.ascii = truth(options.at(0, "ensure_ascii")), .sorted = truth(options.at(3, "sort_keys"))};
  writer.indent = indent.is_number_integer() && indent >= 0 ? std::string(indent.get<size_t>(), ' ') : text_of(indent);
  if (!writer.indent.empty()) writer.comma = ",";
  if (separators.is_array() && separators.size() == 2) {
    writer.comma = text_of(separators[0]);
    writer.colon = text_of(separators[1]);
  }
  return writer.write(value);
}

Value list_of(const Value& value) {
  if (value.is_array()) return value;
  auto list = Value::array();
  if (value.is_object()) {
    for (const auto& [key, item] : value.items()) {
      if (key != kNumber) list.push_back(key);
    }
  } else if (value.is_string()) {
    for (const auto character : data::characters_of(value.get_ref<const std::string&>())) list.push_back(data::to_utf8({&character, 1}));
  } else if (!value.is_discarded()) {
    throw UsageError("{} has no items", value.type_name());
  }
  return list;
}

const Value* find(const Value& value, const Value& key) {
  if (value.is_object() && key.is_string()) {
    const auto found = value.find(key.get_ref<const std::string&>());
    return found == value.end() ? nullptr : &*found;
  }
  if (!value.is_array() || !key.is_number_integer()) return nullptr;
  const auto at = key.get<int64_t>(), size = static_cast<int64_t>(value.size()), place = at < 0 ? at + size : at;
  return place >= 0 && place < size ? &value[static_cast<size_t>(place)] : nullptr;
}

Value item_of(const Value& value, const Value& key) {
  const auto characters = value.is_string() && key.is_number() ? list_of(value) : Value();
  const auto* found = find(value.is_string() ? characters : value, key);
  return found == nullptr ? Value(kUndefined) : *found;
}

std::string_view stripped(std::string_view text, std::string_view method, const Value& set) {
  const auto goes = [&](std::string_view character) {
    const auto code = data::first_character(character);
    return set.is_string() ? set.get_ref<const std::string&>().find(character) != std::string::npos
                           : data::is_white(code) || (code >= 0x1C && code <= 0x1F);
  };
  const auto length = [&] { return data::length_of_first(text); };
  while (method != "rstrip" && !text.empty() && goes(text.substr(0, length()))) text.remove_prefix(length());
  while (method != "lstrip" && !text.empty() && goes(text.substr(data::last_character(text))))
    text = text.substr(0, data::last_character(text));
  return text;
}

bool is_listed(std::string_view words, std::string_view word) {
  return words.find(fmt::format(" {} ", word)) != std::string_view::npos;
}

}  // namespace tessera::llm::jinja
