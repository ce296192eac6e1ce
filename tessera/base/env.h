// Environment variables, read with errors that name them. Variables of Tessera must be in the table of env_table.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// The value, or nothing if the variable is unset or empty. Throws Error for a TESSERA_ name that is not in the table.
std::optional<std::string> env(const char* name);

/// The value as a whole number, or nothing if the variable is unset or empty. Throws ConfigError, which names the variable, if the value is
/// not a whole number in [low, high].
std::optional<int64_t> env_int(const char* name, int64_t low, int64_t high);

/// The index of the value among the choices, or nothing if the variable is unset or empty. Throws ConfigError, which names the variable and
/// the choices, if the value is none of them.
std::optional<size_t> env_choice(const char* name, std::span<const std::string_view> choices);

}  // namespace tessera
