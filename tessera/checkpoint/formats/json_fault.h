// Describes what is wrong with JSON in a file, more briefly than the JSON library does.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

namespace tessera::checkpoint {

inline std::string fault_of(const nlohmann::json::exception& error) {
  if (const auto* const syntax = dynamic_cast<const nlohmann::json::parse_error*>(&error)) {
    return fmt::format("it is damaged: it is not JSON from byte {} on", syntax->byte);
  }
  return "it is damaged: a value is missing or has the wrong type";
}

}  // namespace tessera::checkpoint
