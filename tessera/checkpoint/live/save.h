// One save, from its beginning to its commit. checkpoint::save() runs all steps in a row; AsyncSaver runs all but the first in a background
// thread.
#pragma once

#include <c10/util/FunctionRef.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/checkpoint/live/rank_contents.h"
#include "tessera/checkpoint/save_options.h"

namespace tessera::checkpoint {

/// Throws on all ranks for contents that can't be saved. Returns the number of this save (RankRecord::save). Collective.
uint64_t expect_savable(const std::filesystem::path& folder, const Contents& contents, const Communicator& world,
                        const SaveOptions& options, const std::string& failure);
/// Returns an absolute path, which names the same folder after the program has changed its working directory.
std::filesystem::path lasting_name(const std::filesystem::path& folder);

class Save {
 public:
  /// Rank 0 makes the folder in which all ranks write. Collective.
  Save(const std::filesystem::path& folder, const Contents& contents, const Communicator& world, const SaveOptions& options);

  const std::filesystem::path& folder() const { return folder_; }
  /// The random number of this save, RankRecord::save.
  uint64_t number() const { return number_; }

  /// Writes the files of this process's ranks. A file under its final name is complete and on disk. Calls `moved` after each tensor.
  void write(const std::vector<RankContents>& ranks, c10::function_ref<void()> moved) const;
  /// The first file of a rank that is not there (yet).
  std::optional<std::filesystem::path> missing_file() const;
  /// In the process of rank 0, checks the files of all ranks, writes the manifest, and gives the folder its name. Does nothing in
  /// other processes. Without this call or abandon(), the destructor removes the folder.
  void commit();
  /// Leaves the folder where it is, because other ranks may still write into it.
  void abandon();

  /// The text that other ranks put before an error of one rank: before commit(), and during it, when the folder may already have its final
  /// name.
  std::string failure() const;
  std::string commit_failure() const;

 private:
  std::filesystem::path folder_, working_;  // the final folder, and the folder into which ranks write
  int ranks_;
  SaveOptions options_;
  uint64_t number_ = 0;
  std::optional<NewFolder> made_;  // in the process of rank 0, until commit()
};

}  // namespace tessera::checkpoint
