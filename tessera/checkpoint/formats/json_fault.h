// Says what is wrong with JSON in a file, in few words and without those of the JSON library.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

namespace tessera::checkpoint {

inline std::string fault_of(const nlohmann::json::exception& error) {
  if (const auto* const syntax = dynamic_cast<const nlohmann::json::parse_error*>(&error)) {
    return fmt::format("it is damaged: it is no JSON at byte {}", syntax->byte);
  }
  return "it is damaged: it lacks something, or has it in another form";
}

}  // namespace tessera::checkpoint
