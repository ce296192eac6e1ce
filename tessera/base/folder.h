// The contents of a folder.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// The names in a folder, sorted, or nothing if there is no such folder. Throws IoError if the folder can't be read to its end: a file that
/// was missed would look like one that does not exist.
std::optional<std::vector<std::string>> names_in(const std::filesystem::path& folder);

/// Makes a folder and those around it, unless they are there. Throws IoError if it can't.
void make_folder(const std::filesystem::path& folder);

/// Whether there is something at the path. Throws IoError if that can't be found out.
bool is_there(const std::filesystem::path& path);

}  // namespace tessera
