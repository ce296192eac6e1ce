// The values of a key: how they are spelled, and which are refused.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/config/keys.h"

namespace tessera::config {

/// Returns a value in the one spelling that settings have: "true" for yes, "100000000" for 1e8, "FULL_SHARD" for full_shard or for 1.
/// Throws ConfigError, which names the key, for a value that makes no sense or is refused.
std::string to_value(const Key& key, std::string_view text);

/// Reads a truth value as YAML 1.1 does: yes, no, on, off, y, n, true, false in any case; also 1 and 0.
std::optional<bool> to_bool(std::string_view text);
/// Reads a whole number, also in the form 1e8.
std::optional<int64_t> to_integer(std::string_view text);

/// Describes the values of a key: "one of no, fp16, bf16", "a whole number from 1 on".
std::string describe_values(const Key& key);

}  // namespace tessera::config
