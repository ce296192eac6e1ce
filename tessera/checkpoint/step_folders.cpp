#include "tessera/checkpoint/step_folders.h"

#include <fmt/format.h>

#include <charconv>
#include <random>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/rank_file.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

fs::path step_folder(const fs::path& prefix, int64_t step) {
  return fmt::format("{}-step-{:06}", prefix.string(), step);
}

bool is_complete(const fs::path& folder) {
  std::error_code no_folder;
  if (!is_there(folder) || !fs::is_directory(folder, no_folder)) return false;
  names_in(folder);  // throws here if the folder can't be read
  try {
    return saved_ranks(folder) > 0;
  } catch (const IoError&) {
    return false;
  }
}

std::optional<fs::path> latest(const fs::path& prefix) {
  const auto parent = prefix.has_parent_path() ? prefix.parent_path() : fs::path(".");
  const auto start = prefix.filename().string() + "-step-";
  std::optional<fs::path> newest;
  int64_t newest_step = -1;
  for (const auto& name : names_in(parent).value_or(std::vector<std::string>())) {
    if (!name.starts_with(start)) continue;
    int64_t step = -1;
    const auto* const last = name.data() + name.size();
    const auto [stop, wrong] = std::from_chars(name.data() + start.size(), last, step);
    if (wrong != std::errc() || stop != last || step <= newest_step) continue;
    newest = prefix.parent_path() / name;
    newest_step = step;
  }
  // Throws if the newest checkpoint is incomplete. If it were skipped, the run would continue from an older one and later save to the same
  // name.
  if (newest) saved_ranks(*newest);
  return newest;
}

void expect_usable(const fs::path& prefix) {
  if (!prefix.has_filename()) {
    throw UsageError(fmt::format("the prefix {} is a folder; add what the names of checkpoints in it shall begin with", prefix.string()));
  }
  const NewFolder trial(fmt::format("{}-trial-{:08x}", prefix.string(), std::random_device()()));
}

}  // namespace tessera::checkpoint
