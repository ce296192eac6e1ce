#include "tessera/xla/pjrt/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pjrt_c_api.h>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/xla/pjrt/wire.h"

namespace tessera::pjrt {
namespace {

Option option_of(std::string_view text) {
  if (const auto number = number_of<int64_t>(text)) return *number;
  if (text == "true" || text == "false") return text == "true";
  return std::string(text);
}

std::string wire_of(const Option& option) {
  WireWriter writer;
  if (const auto* text = std::get_if<std::string>(&option)) {
    writer.bytes(1, *text);
  } else if (const auto* flag = std::get_if<bool>(&option)) {
    writer.number(2, *flag);
  } else if (const auto* number = std::get_if<int64_t>(&option)) {
    writer.number(3, *number);
  } else {
    throw UsageError("an option of the compiler must be text, a whole number or a bool, not {}", text_of(option));
  }
  return writer.text();
}

}  // namespace

Options parse_options(std::string_view text) {
  Options options;
  std::string name;
  while (!text.empty()) {
    const auto item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const auto equals = item.find('=');
    if (equals != std::string_view::npos && equals > 0) {
      name = item.substr(0, equals);
      options[name] = option_of(item.substr(equals + 1));
    } else if (const auto number = number_of<int64_t>(item); number && !name.empty()) {
      auto& option = options[name];
      if (const auto* first = std::get_if<int64_t>(&option)) option = std::vector<int64_t>{*first};
      if (auto* list = std::get_if<std::vector<int64_t>>(&option)) {
        list->push_back(*number);
        continue;
      }
      throw ConfigError("'{}' follows the option {}, which is not a list of numbers: write name=value, separated by commas", item, name);
    } else {
      throw ConfigError("'{}' is not an option: write name=value, separated by commas", item);
    }
  }
  return options;
}

std::string text_of(const Option& option) {
  if (const auto* list = std::get_if<std::vector<int64_t>>(&option)) return fmt::format("{}", fmt::join(*list, ","));
  return std::visit(
      [](const auto& value) -> std::string {
        if constexpr (requires { value.data(); }) {
          return std::string(value.begin(), value.end());
        } else {
          return fmt::format("{}", value);
        }
      },
      option);
}

std::vector<PJRT_NamedValue> named_values(const Options& options) {
  std::vector<PJRT_NamedValue> values;
  for (const auto& [name, option] : options) {
    PJRT_NamedValue value{};
    value.struct_size = PJRT_NamedValue_STRUCT_SIZE;  // an array element must have the size that the plugin expects
    value.name = name.data();
    value.name_size = name.size();
    value.value_size = 1;
    if (const auto* text = std::get_if<std::string>(&option)) {
      value.type = PJRT_NamedValue_kString;
      value.string_value = text->data();
      value.value_size = text->size();
    } else if (const auto* number = std::get_if<int64_t>(&option)) {
      value.type = PJRT_NamedValue_kInt64;
      value.int64_value = *number;
    } else if (const auto* list = std::get_if<std::vector<int64_t>>(&option)) {
      value.type = PJRT_NamedValue_kInt64List;
      value.int64_array_value = list->data();
      value.value_size = list->size();
    } else if (const auto* real = std::get_if<float>(&option)) {
      value.type = PJRT_NamedValue_kFloat;
      value.float_value = *real;
    } else {
      value.type = PJRT_NamedValue_kBool;
      value.bool_value = std::get<bool>(option);
    }
    values.push_back(value);
  }
  return values;
}

Options from_named_values(const PJRT_NamedValue* values, size_t count) {
  Options options;
  for (size_t i = 0; i < count; i++) {
    const auto& value = values[i];
    auto& option = options[{value.name, value.name_size}];
    switch (value.type) {
      case PJRT_NamedValue_kString:
        option = std::string(value.string_value, value.value_size);
        break;
      case PJRT_NamedValue_kInt64:
        option = value.int64_value;
        break;
      case PJRT_NamedValue_kInt64List:
        option = std::vector<int64_t>(value.int64_array_value, value.int64_array_value + value.value_size);
        break;
      case PJRT_NamedValue_kFloat:
        option = value.float_value;
        break;
      case PJRT_NamedValue_kBool:
        option = value.bool_value;
        break;
    }
  }
  return options;
}

std::string serialized(const CompileOptions& options) {
  WireWriter ids, assignment, build, all;
  for (int replica = 0; replica < options.replicas; replica++) ids.packed(static_cast<uint64_t>(replica));
  assignment.number(1, options.replicas).number(2, 1).bytes(3, WireWriter().bytes(1, ids.text()).text());
  // Sets one partition explicitly: without the number, a plugin aborts the process.
  build.number(1, -1).number(4, options.replicas).number(5, 1).bytes(9, assignment.text());
  if (options.effort) build.number(24, options.effort).number(25, options.effort);
  all.bytes(3, build.text());
  for (const auto& [name, option] : options.overrides) all.bytes(7, WireWriter().bytes(1, name).bytes(2, wire_of(option)).text());
  return all.text();
}

}  // namespace tessera::pjrt
