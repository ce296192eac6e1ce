// What a checkpoint holds, for people and for programs.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace tessera::checkpoint {

/// The format, the files with their sizes, each tensor with its dtype, shape, bytes and the number of its parts, other values, and totals.
/// Reads no tensor.
nlohmann::ordered_json inspect(const std::filesystem::path& path);
/// The same as a table.
std::string to_table(const nlohmann::ordered_json& found);

}  // namespace tessera::checkpoint
