// The contents of a folder, of the file system or of a Storage.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// The names in a folder that begin so, sorted, or nothing if there is no such folder. Throws IoError if the folder can't be read to its
/// end: a file that was missed would look like one that does not exist.
std::optional<std::vector<std::string>> names_in(const std::filesystem::path& folder, std::string_view start = {});

/// A new folder among the temporary ones, which goes with this object. Throws IoError.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& name);
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// What the system says of a file that can't be opened, or of a place where nothing can be written, and the way out.
std::string why_not_opened(const std::filesystem::path& path, int reason);
std::string why_unwritable(int reason);

/// Makes a folder and those around it, unless they are there. Throws IoError if it can't.
void make_folder(const std::filesystem::path& folder);

/// Whether there is something at the path. Throws IoError if that can't be found out.
bool is_there(const std::filesystem::path& path);

/// Whether there is a folder of this name. In a Storage these are the names before a slash.
bool is_folder(const std::filesystem::path& path);

/// The bytes of a file, or nothing if there is none.
std::optional<uint64_t> size_of_file(const std::filesystem::path& path);

/// Removes a file, or a folder with all that is in it, unless there is none. Throws IoError if it can't.
void remove_tree(const std::filesystem::path& path);

/// What a symbolic link leads to, whether that is there or not; any other path as it is, but without a slash at its end.
std::filesystem::path link_target(std::filesystem::path path);

/// The path of something beside it, also where the path ends with a slash: "run.new" for "run/" and ".new".
std::filesystem::path beside(std::filesystem::path path, const char* suffix);

/// Gives the folder `made` the name `folder`. What had that name is removed. Where the file system can exchange two names, there is a
/// complete folder under the name at any moment; elsewhere it is under FOLDER.old for an instant, and recover_folder() brings it back after
/// the process was killed then. Throws IoError.
void replace_folder(const std::filesystem::path& folder, const std::filesystem::path& made);
void recover_folder(const std::filesystem::path& folder);

}  // namespace tessera
