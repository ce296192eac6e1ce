#include "tessera/base/format.h"

#include <fmt/args.h>
#include <fmt/format.h>

namespace tessera {

std::string format_values(std::string_view format, std::span<const FormatValue> values) {
  fmt::dynamic_format_arg_store<fmt::format_context> all;
  for (const auto& each : values) std::visit([&](const auto& value) { all.push_back(value); }, each);
  return fmt::vformat(format, all);
}

}  // namespace tessera
