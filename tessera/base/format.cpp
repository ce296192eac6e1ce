#include "tessera/base/format.h"

#include <fmt/args.h>
#include <fmt/format.h>

namespace tessera {

std::string format_values(std::string_view format, std::span<const FormatValue> values) {
  using Kind = FormatValue::Kind;
  fmt::dynamic_format_arg_store<fmt::format_context> all;
  for (const auto& each : values) {
    switch (each.kind) {
      case Kind::Bool:
        all.push_back(each.integer != 0);
        break;
      case Kind::Char:
        all.push_back(static_cast<char>(each.integer));
        break;
      case Kind::Signed:
        all.push_back(each.integer);
        break;
      case Kind::Unsigned:
        all.push_back(static_cast<uint64_t>(each.integer));
        break;
      case Kind::Float:
        all.push_back(static_cast<float>(each.number));
        break;
      case Kind::Double:
        all.push_back(each.number);
        break;
      case Kind::Text:
        all.push_back(each.text);
        break;
    }
  }
  return fmt::vformat(format, all);
}

}  // namespace tessera
