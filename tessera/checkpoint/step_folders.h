// The folders of a training run's checkpoints, PREFIX-step-N: their names, the newest of them, and whether one is complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Returns the name of the folder: PREFIX-step-000500 for step 500.
std::filesystem::path step_folder(const std::filesystem::path& prefix, int64_t step);
/// Returns PREFIX if the folder's name is PREFIX-step-N.
std::optional<std::filesystem::path> prefix_of(const std::filesystem::path& folder);
/// Returns N if the folder's name is PREFIX-step-N.
std::optional<int64_t> step_of(const std::filesystem::path& folder);
struct StepFolder {
  int64_t step = 0;
  std::filesystem::path folder;
};
/// Returns all folders PREFIX-step-N, sorted by step. Throws IoError if their parent folder can't be read.
std::vector<StepFolder> step_folders(const std::filesystem::path& prefix);

/// Returns the prefixes of the checkpoints in the folder, without the folder and sorted. Throws IoError if the folder can't be read.
std::vector<std::string> prefixes_in(const std::filesystem::path& folder);

enum class Check { Sizes, Checksums };
/// Returns the complete checkpoint PREFIX-step-N with the largest N, or nothing if there is none. Skips newer folders that are
/// incomplete or damaged, with a warning that says why. Only Check::Checksums, which reads every byte, finds damage inside files;
/// otherwise load() finds it. Throws IoError if the parent folder can't be read, and UsageError for a checkpoint of another version.
std::optional<std::filesystem::path> latest(const std::filesystem::path& prefix, Check check = Check::Sizes);
/// The same for programs of several ranks: rank 0 searches, so that all ranks resume from the same checkpoint. If `before` is given,
/// considers only steps below it. Collective.
std::optional<std::filesystem::path> latest(const std::filesystem::path& prefix, const Communicator& world, Check check = Check::Sizes,
                                            std::optional<int64_t> before = {});
/// Whether the folder holds a manifest and the files of all ranks with their sizes. Reads no tensors: verify() does. Throws IoError if the
/// folder can't be read.
bool is_complete(const std::filesystem::path& folder);
/// Returns why a folder is not a complete checkpoint; nothing if it is one.
std::optional<std::string> why_incomplete(const std::filesystem::path& folder);
/// Renames a folder that can't be loaded to FOLDER.damaged, so that its name is free, and logs why. Throws IoError if the folder can't be
/// renamed, which is always so in an object store.
void set_aside(const std::filesystem::path& folder, const std::string& why);
/// Throws UsageError if the path is the prefix of a run: a file or folder of this name would hide the run's checkpoints from all commands.
void expect_no_run(const std::filesystem::path& prefix);
/// Makes PREFIX-latest a link to the folder PREFIX-step-N, for people and for scripts. In an object store, PREFIX-latest is an object that
/// contains the folder's name, so that step_folders() finds the last save even if the store does not list it yet.
void link_latest(const std::filesystem::path& folder);
/// If the target of PREFIX-latest has been removed, makes the link lead to the newest checkpoint that is left, or removes the link.
void mend_latest(const std::filesystem::path& prefix);
/// Throws if no checkpoint can be written under the prefix. Call it before a training run, so that the error does not come after it.
void expect_usable(const std::filesystem::path& prefix);

}  // namespace tessera::checkpoint
