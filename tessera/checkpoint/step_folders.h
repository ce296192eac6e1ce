// The checkpoints of a training run, PREFIX-step-N: what they are called, which is the newest, and whether one is complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace tessera::checkpoint {

/// PREFIX-step-000500
std::filesystem::path step_folder(const std::filesystem::path& prefix, int64_t step);
/// The newest checkpoint `PREFIX-step-N`, by N; nothing if there is none. Throws IoError if it is incomplete.
std::optional<std::filesystem::path> latest(const std::filesystem::path& prefix);
/// Whether the folder holds the files of all its ranks.
bool is_complete(const std::filesystem::path& folder);
/// Throws if no checkpoint could be made under that prefix: better known before a training run than after it.
void expect_usable(const std::filesystem::path& prefix);

}  // namespace tessera::checkpoint
