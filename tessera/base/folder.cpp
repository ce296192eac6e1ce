#include "tessera/base/folder.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera {

namespace fs = std::filesystem;

std::optional<std::vector<std::string>> names_in(const fs::path& folder) {
  std::error_code error;
  std::vector<std::string> names;
  fs::directory_iterator entry(folder, error);
  if (error == std::errc::no_such_file_or_directory) return std::nullopt;
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) names.push_back(entry->path().filename().string());
  if (error) throw IoError(fmt::format("can't read the folder {}: {}", folder.string(), error.message()));
  std::ranges::sort(names);
  return names;
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw IoError(fmt::format("can't create the folder {}: {}", folder.string(), error.message()));
}

bool is_there(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) return false;
  if (error) throw IoError(fmt::format("can't look at {}: {}", path.string(), error.message()));
  return true;
}

}  // namespace tessera
