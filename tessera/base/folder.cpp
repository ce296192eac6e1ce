#include "tessera/base/folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/storage.h"
#include "tessera/base/words.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

void move_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) throw IoError("can't rename {} to {}: {}", from, to, error.message());
}

std::string beginning(const ObjectPath& folder) {
  return folder.name.empty() ? "" : folder.name + '/';
}

std::optional<std::vector<std::string>> names_in(const ObjectPath& folder, std::string_view begin) {
  std::set<std::string> names;
  const auto start = beginning(folder);
  for (const auto& name : folder.storage->list(start + std::string(begin)))
    names.insert(name.substr(start.size(), name.find('/', start.size()) - start.size()));
  if (names.empty()) return std::nullopt;
  return std::vector(names.begin(), names.end());
}

}  // namespace

std::optional<std::vector<std::string>> names_in(const fs::path& folder, std::string_view start) {
  if (const auto there = object_path(folder)) return names_in(*there, start);
  std::error_code error;
  std::vector<std::string> names;
  fs::directory_iterator entry(folder, error);
  if (error == std::errc::no_such_file_or_directory) return std::nullopt;
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (auto name = entry->path().filename().string(); name.starts_with(start)) names.push_back(std::move(name));
  }
  if (error) throw IoError("can't read the folder {}: {}", folder, error.message());
  std::ranges::sort(names);
  return names;
}

TemporaryFolder::TemporaryFolder(const std::string& name) {
  const auto among = std::filesystem::temp_directory_path();
  auto made = (among / (name + "-XXXXXX")).string();
  if (::mkdtemp(made.data()) == nullptr) throw IoError("can't make a folder in {}: {}", among, std::strerror(errno));
  path_ = made;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code failed;  // a folder that can't be removed is left to the system
  std::filesystem::remove_all(path_, failed);
}

std::string why_not_opened(const fs::path& path, int reason) {
  std::string why = std::strerror(reason);
  if (reason != ENOENT) return why;
  const auto folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const auto names = names_in(folder);
  if (!names) return fmt::format("{}; there is no folder {}", why, folder.string());
  const auto nearest = nearest_name(path.filename().string(), *names);
  if (!nearest.empty()) return fmt::format("{}; did you mean {}?", why, (path.parent_path() / nearest).string());
  return fmt::format("{}; {} {}", why, path.has_parent_path() ? folder.string() : "this folder",
                     names->empty() ? "is empty" : "has " + printable(some_of(*names)));
}

std::string why_unwritable(int reason) {
  std::string why = std::strerror(reason);
  if (reason == EACCES || reason == EPERM || reason == EROFS) why += "; choose a place where this user may write";
  if (reason == ENOSPC || reason == EDQUOT) why += "; make room, or choose a place that has some";
  if (reason == ENOENT || reason == ENOTDIR) why += "; make its folder first, or choose another place";
  return why;
}

void make_folder(const fs::path& folder) {
  if (folder.empty() || object_path(folder)) return;
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw IoError("can't create the folder {}: {}", folder, why_unwritable(error.value()));
}

bool is_folder(const fs::path& path) {
  if (const auto there = object_path(path)) return !there->storage->list(beginning(*there)).empty();
  std::error_code unknown;
  return fs::is_directory(path, unknown);
}

std::optional<uint64_t> size_of_file(const fs::path& path) {
  if (const auto there = object_path(path)) return there->storage->size(there->name);
  std::error_code none;
  const auto size = fs::file_size(path, none);
  return none ? std::nullopt : std::optional<uint64_t>(size);
}

void remove_tree(const fs::path& path) {
  if (const auto there = object_path(path)) {
    for (const auto& name : there->storage->list(beginning(*there))) there->storage->remove(name);
    if (there->storage->size(there->name)) there->storage->remove(there->name);
    return;
  }
  std::error_code error;
  fs::remove_all(path, error);
  if (error) throw IoError("can't remove {}: {}", path, error.message());
}

bool is_there(const fs::path& path) {
  if (const auto there = object_path(path)) return there->storage->size(there->name) || is_folder(path);
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) return false;
  if (error) throw IoError("can't look at {}: {}", path, error.message());
  return true;
}

fs::path link_target(fs::path path) {
  constexpr int kMostLinks = 40;  // the kernel's limit
  if (!path.has_filename() && path.has_relative_path()) path = path.parent_path();
  std::error_code error;
  for (int i = 0; i < kMostLinks && fs::is_symlink(path, error); i++) {
    const auto target = fs::read_symlink(path, error);
    if (error) break;
    path = path.parent_path() / target;  // an absolute target replaces the whole path
    if (!path.has_filename() && path.has_relative_path()) path = path.parent_path();
  }
  return path;
}

fs::path beside(fs::path path, const char* suffix) {
  if (!path.has_filename()) path = path.parent_path();
  return path += suffix;
}

void replace_folder(const fs::path& folder, const fs::path& made) {
  if (object_path(folder)) throw IoError("{} is in an object store, where nothing can be renamed; save under a new name each time", folder);
  recover_folder(folder);
  std::error_code unknown;
  if (!is_there(folder)) return move_folder(made, folder);
  if (::renameat2(AT_FDCWD, made.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) == 0) {
    fs::remove_all(made, unknown);
    return;
  }
  const auto old = beside(folder, ".old");
  fs::remove_all(old, unknown);
  move_folder(folder, old);
  move_folder(made, folder);
  fs::remove_all(old, unknown);
}

void recover_folder(const fs::path& folder) {
  const auto old = beside(folder, ".old");
  if (!is_there(folder) && is_there(old)) move_folder(old, folder);
}

}  // namespace tessera
