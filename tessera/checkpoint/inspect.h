// Lists the contents of a checkpoint, for people and for programs.
#pragma once

#include <filesystem>
#include <string>

namespace tessera::checkpoint {

/// Returns JSON: the format, the files with their sizes, each tensor with its dtype, shape, bytes and the number of its parts, other
/// values, and totals. Reads no tensor.
std::string inspect(const std::filesystem::path& path);
/// Formats the JSON of inspect() as a table.
std::string to_table(const std::string& inspected);

}  // namespace tessera::checkpoint
