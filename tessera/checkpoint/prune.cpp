#include "tessera/checkpoint/prune.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/notes.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Returns the value of a checkpoint's note `name`, by which Keep::best ranks; nothing if it has none, such as one of before Keep::best was
/// asked for.
std::optional<double> metric_of(const fs::path& folder, const std::string& name) {
  const auto manifest = read_manifest(folder);
  const auto& notes = manifest.notes.front();
  const auto found = notes.find(name);
  if (found == notes.end()) return std::nullopt;
  Notes named;
  named[name] = found->second;
  return named.at(name).as<double>();
}

void remove_checkpoint(const fs::path& folder) {
  remove_tree(folder / kManifestFile);  // removed first, because a save writes it last
  remove_tree(folder);
}

}  // namespace

void expect_sensible(const Keep& keep) {
  if (keep.last < 1) throw UsageError("Keep::last is {}, but the newest checkpoint always stays: give 1 or more", keep.last);
  if (keep.every < 0 || keep.best < 0) throw UsageError("Keep::every and Keep::best can't be negative");
  if (keep.best > 0 && keep.metric.empty()) throw UsageError("Keep::best needs a metric: the name of a note that is a number");
}

std::vector<fs::path> prune(const fs::path& prefix, const Keep& keep, const fs::path& also) {
  expect_sensible(keep);
  auto all = step_folders(prefix);
  std::erase_if(all, [](const StepFolder& each) { return !is_complete(each.folder); });
  std::set<int64_t> kept;
  for (size_t i = 0; i < all.size() && i < static_cast<size_t>(keep.last); i++) kept.insert(all[all.size() - 1 - i].step);
  for (const auto& each : all) {
    if (keep.every > 0 && each.step % keep.every == 0) kept.insert(each.step);
  }
  if (keep.best > 0) {
    std::vector<std::pair<double, int64_t>> ranking;
    bool has_metric = false;
    for (const auto& each : all) {
      const auto metric = metric_of(each.folder, keep.metric);
      has_metric = has_metric || metric;
      if (!metric || std::isnan(*metric)) continue;                                  // a NaN is never among the best
      ranking.emplace_back(keep.higher_is_better ? -*metric : *metric, -each.step);  // if metrics are equal, the newer checkpoint is better
    }
    if (!all.empty() && !has_metric)
      throw UsageError("{} has no note '{}', which Keep::best compares, and no other checkpoint has it", all.back().folder, keep.metric);
    std::ranges::sort(ranking);
    ranking.resize(std::min(ranking.size(), static_cast<size_t>(keep.best)));
    for (const auto& [metric, step] : ranking) kept.insert(-step);
  }
  std::vector<fs::path> removed;
  for (const auto& each : all) {
    if (kept.contains(each.step) || each.folder.lexically_normal() == also.lexically_normal()) continue;
    remove_checkpoint(each.folder);
    removed.push_back(each.folder);
  }
  return removed;
}

std::vector<fs::path> prune(const fs::path& prefix, const Keep& keep, const Communicator& world) {
  std::vector<fs::path> removed;
  AllOrNone step;
  step.attempt([&] {
    if (world.is_first()) removed = prune(prefix, keep);
  });
  step.expect_all(world, {.unit = "checkpoint"}, fmt::format("could not remove old checkpoints of {}", prefix.string()));
  return removed;
}

}  // namespace tessera::checkpoint
