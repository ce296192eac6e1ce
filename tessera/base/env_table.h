// All environment variables of Tessera itself. env() refuses to read any other variable named TESSERA_...; if such a variable is set, a
// warning reports it as a probable typo.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct EnvVariable {
  std::string_view name;  // a `*` at the end matches any suffix
  std::string_view values;
  std::string_view meaning;
  std::string_view read_by;
  bool for_tests = false;
};

/// The table from which docs/tables/environment.md is generated.
std::span<const EnvVariable> env_table();

/// Adds to the table the variables that another folder of the library reads, unless the table has them already.
struct AddedEnv {
  explicit AddedEnv(const std::vector<EnvVariable>& variables);
};

/// Whether the name is in the table or does not begin with TESSERA_.
bool is_known_env(std::string_view name);

/// A warning that names the TESSERA_ variables that are set but not in the table, with suggestions; nothing if there are none.
std::optional<std::string> warning_of_unknown_env();

}  // namespace tessera
