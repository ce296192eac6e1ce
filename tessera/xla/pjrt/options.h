// Options of plugins, topologies and compilers: names with values of a few types.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

struct PJRT_NamedValue;

namespace tessera::pjrt {

using Option = std::variant<std::string, int64_t, std::vector<int64_t>, float, bool>;
using Options = std::map<std::string, Option>;

/// Parses options such as "wrap=1,1,1,chip_config_name=megacore": a list of numbers ends at the next name.
Options parse_options(std::string_view text);
std::string text_of(const Option& option);

/// Returns the options in PJRT's form, which points into `options`.
std::vector<PJRT_NamedValue> named_values(const Options& options);
/// Converts options from PJRT's form.
Options from_named_values(const PJRT_NamedValue* values, size_t count);

struct CompileOptions {
  int replicas = 1;
  /// Flags of XLA by their names.
  Options overrides = {};
  /// How hard a TPU compiler tries to make the program fast and small in memory: from 9 (no more than needed) to 39; 0 is the compiler's
  /// own choice.
  int effort = 0;
};
/// The bytes of a CompileOptionsProto.
std::string serialized(const CompileOptions& options);

}  // namespace tessera::pjrt
