// The folders of a training run's checkpoints, PREFIX-step-N: their names, the newest of them, and whether one is complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace tessera::checkpoint {

/// For step 500: PREFIX-step-000500
std::filesystem::path step_folder(const std::filesystem::path& prefix, int64_t step);
/// The checkpoint PREFIX-step-N with the largest N, or nothing if there is none. Throws IoError if that checkpoint is
/// incomplete, or if the folder around it can't be read.
std::optional<std::filesystem::path> latest(const std::filesystem::path& prefix);
/// Whether the folder holds the files of all its ranks. Throws IoError if it can't be read.
bool is_complete(const std::filesystem::path& folder);
/// Throws if no checkpoint can be written under the prefix. Call it before a training run, so that the error does not come after it.
void expect_usable(const std::filesystem::path& prefix);

}  // namespace tessera::checkpoint
