// Functions for folders and their contents, in the file system or in a Storage.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/no_copy.h"

namespace tessera {

/// Returns the names in a folder that begin with `start`, sorted, or nothing if there is no such folder. Throws IoError if the folder can't
/// be read to its end, because a file that was missed would look like one that does not exist.
std::optional<std::vector<std::string>> names_in(const std::filesystem::path& folder, std::string_view start = {});

/// A new temporary folder, which the destructor removes. Throws IoError.
class TemporaryFolder : NoCopy {
 public:
  explicit TemporaryFolder(const std::string& name);
  ~TemporaryFolder();

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Say why a file can't be opened, or why nothing can be written in a place, and the way out. `reason` is the value of errno.
std::string why_not_opened(const std::filesystem::path& path, int reason);
std::string why_unwritable(int reason);

/// Makes a folder and its parents where they are missing. Throws IoError if it can't.
void make_folder(const std::filesystem::path& folder);

/// Whether there is something at the path. Throws IoError if that can't be found out.
bool is_there(const std::filesystem::path& path);

/// Whether there is a folder of this name. In a Storage, names before a slash are folders.
bool is_folder(const std::filesystem::path& path);

/// Returns the size of a file in bytes, or nothing if the file does not exist.
std::optional<uint64_t> size_of_file(const std::filesystem::path& path);

/// Removes a file, or a folder with all that is in it. Does nothing if there is none. Throws IoError if it can't.
void remove_tree(const std::filesystem::path& path);

/// Returns the final target of a symbolic link, whether it exists or not; any other path as it is, but without a slash at its end.
std::filesystem::path link_target(std::filesystem::path path);

/// Appends `suffix` to the last name of a path, also where the path ends with a slash: "run.new" for "run/" and ".new".
std::filesystem::path beside(std::filesystem::path path, const char* suffix);

/// Renames the folder `made` to `folder`, and removes the folder that had that name. Where the file system can exchange two names, a
/// complete folder has the name at any moment. Elsewhere the previous folder is at FOLDER.old for an instant; if the process is killed
/// then, recover_folder() renames it back. Throws IoError.
void replace_folder(const std::filesystem::path& folder, const std::filesystem::path& made);
void recover_folder(const std::filesystem::path& folder);

}  // namespace tessera
