// Every environment variable of Tessera's own, in one list: nothing else may be read, and what else is set is a slip of the pen.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

struct EnvVariable {
  std::string_view name;  // a `*` at its end stands for anything
  std::string_view values;
  std::string_view meaning;
  std::string_view read_by;
  bool for_tests = false;
};

/// The list, from which docs/environment.md is made.
std::span<const EnvVariable> env_table();

/// Whether the list has the name, or it is not one of Tessera's own (TESSERA_...).
bool is_known_env(std::string_view name);

/// A warning about what is set in the environment but stands in no line of the list, with the names that may be meant.
std::optional<std::string> warning_of_unknown_env();

}  // namespace tessera
