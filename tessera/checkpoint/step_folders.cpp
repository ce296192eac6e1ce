#include "tessera/checkpoint/step_folders.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <random>
#include <set>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/log.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "-step-";

/// Returns N if the text is the number N and nothing else.
std::optional<int64_t> number_in(std::string_view text) {
  int64_t number = -1;
  const auto* const last = text.data() + text.size();
  const auto [stop, wrong] = std::from_chars(text.data(), last, number);
  if (wrong != std::errc() || stop != last || number < 0) return {};
  return number;
}

fs::path latest_name(const fs::path& prefix) {
  return prefix.string() + "-latest";
}

/// Whether a store has the checkpoint, even if it does not list it yet: some stores list new objects late.
bool is_listed_late(const fs::path& folder) {
  return object_path(folder) && is_there(folder / kManifestFile);
}

/// Returns the folder that was saved last, if the prefix is in a store.
std::optional<StepFolder> last_stored(const fs::path& prefix) {
  if (!object_path(prefix) || !size_of_file(latest_name(prefix))) return {};
  const auto folder = prefix.parent_path() / InputFile(latest_name(prefix)).read_all();
  const auto step = prefix_of(folder) == prefix ? step_of(folder) : std::nullopt;
  return step && is_listed_late(folder) ? std::optional(StepFolder{.step = *step, .folder = folder}) : std::nullopt;
}

}  // namespace

fs::path step_folder(const fs::path& prefix, int64_t step) {
  return fmt::format("{}{}{:06}", prefix.string(), kStep, step);
}

std::optional<fs::path> prefix_of(const fs::path& folder) {
  if (!step_of(folder)) return {};
  const auto text = folder.string();
  return text.substr(0, text.rfind(kStep));
}

std::optional<int64_t> step_of(const fs::path& folder) {
  const auto text = folder.string();
  const auto place = text.rfind(kStep);
  if (place == std::string::npos) return {};
  return number_in(std::string_view(text).substr(place + kStep.size()));
}

std::vector<StepFolder> step_folders(const fs::path& prefix) {
  const auto parent = prefix.has_parent_path() ? prefix.parent_path() : fs::path(".");
  const auto start = fmt::format("{}{}", prefix.filename().string(), kStep);
  std::vector<StepFolder> found;
  for (const auto& name : names_in(parent, start).value_or(std::vector<std::string>())) {
    if (const auto step = number_in(std::string_view(name).substr(start.size())))
      found.push_back({.step = *step, .folder = prefix.parent_path() / name});
  }
  if (const auto last = last_stored(prefix); last && std::ranges::find(found, last->step, &StepFolder::step) == found.end())
    found.push_back(*last);
  std::ranges::sort(found, {}, &StepFolder::step);
  return found;
}

std::vector<std::string> prefixes_in(const fs::path& folder) {
  std::set<std::string> prefixes;
  for (const auto& name : names_in(folder).value_or(std::vector<std::string>())) {
    if (const auto prefix = prefix_of(name)) prefixes.insert(prefix->string());
  }
  return {prefixes.begin(), prefixes.end()};
}

std::optional<std::string> why_incomplete(const fs::path& folder) {
  if (!is_listed_late(folder)) {
    if (!is_there(folder)) return fmt::format("there is no {}", folder.string());
    if (!names_in(folder)) return fmt::format("{} is not a folder", folder.string());  // names_in() throws if the folder can't be read
  }
  try {
    (void)read_manifest(folder);
    return {};
  } catch (const IoError& error) {
    return error.what();
  }
}

bool is_complete(const fs::path& folder) {
  return (is_listed_late(folder) || is_folder(folder)) && !why_incomplete(folder);
}

namespace {

/// Returns the newest checkpoint that can be loaded.
std::optional<StepFolder> newest(const fs::path& prefix, Check check, std::optional<int64_t> before = {}) {
  const auto all = step_folders(prefix);
  for (auto each = all.rbegin(); each != all.rend(); each++) {
    if (before && each->step >= *before) continue;
    auto why = why_incomplete(each->folder);
    if (!why && check == Check::Checksums) {
      if (const auto faults = verify(each->folder).faults; !faults.empty()) why = faults.front();
    }
    if (!why) return *each;
    log(LogLevel::Warning, "skipping a checkpoint that can't be loaded: {}", *why);
  }
  return {};
}

}  // namespace

std::optional<fs::path> latest(const fs::path& prefix, Check check) {
  const auto found = newest(prefix, check);
  return found ? std::optional(found->folder) : std::nullopt;
}

std::optional<fs::path> latest(const fs::path& prefix, const Communicator& world, Check check, std::optional<int64_t> before) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::min();
  const auto failure = fmt::format("could not look for checkpoints {}-step-N", prefix.string());
  std::optional<StepFolder> found;
  all_or_none(world, {.unit = "checkpoint"}, failure, [&] {
    if (world.is_first()) found = newest(prefix, check, before);
  });
  const auto sent = at::full({1}, found ? found->step : kNone, at::TensorOptions(world.traits().device).dtype(at::kLong));
  world.broadcast(sent, 0, {.unit = "checkpoint"}).wait();
  const auto step = sent.item<int64_t>();
  if (step == kNone) return {};
  all_or_none(world, {.unit = "checkpoint"}, failure, [&] {
    for (const auto& each : step_folders(prefix)) {
      if (!found && each.step == step) found = each;
    }
    if (const auto named = step_folder(prefix, step); !found && is_listed_late(named)) found = {.step = step, .folder = named};
    if (found) return;
    throw IoError("rank 0 has found {}, but another rank does not see it; keep checkpoints where all ranks see the same files",
                  step_folder(prefix, step).string());
  });
  return found->folder;
}

void set_aside(const fs::path& folder, const std::string& why) {
  if (object_path(folder)) throw IoError("{} can't be loaded, and a store can't rename it; remove it. The reason: {}", folder, why);
  auto aside = fs::path(folder.string() + ".damaged");
  for (int number = 2; is_there(aside); number++) aside = fmt::format("{}.damaged-{}", folder.string(), number);
  std::error_code error;
  fs::rename(folder, aside, error);
  if (error) throw IoError("can't set {} aside ({}): {}", folder, why, error.message());
  log(LogLevel::Warning, "set aside as {}: {}", aside, why);
}

void expect_no_run(const fs::path& prefix) {
  const auto name = prefix.has_filename() ? prefix : prefix.parent_path();
  const auto folder = name.has_parent_path() ? name.parent_path() : fs::path(".");
  if (!is_there(folder) || step_folders(name).empty()) return;
  throw UsageError(
      "{0} is the prefix of a run; a file or folder of this name would hide its checkpoints {0}-step-N; write under another name", name);
}

void link_latest(const fs::path& folder) {
  const auto link = latest_name(prefix_of(folder).value());
  if (object_path(folder)) return write_text(link, folder.filename().string());  // a store has no links
  const auto next = unfinished_path(link);
  std::error_code none;
  fs::remove(next, none);
  fs::create_directory_symlink(folder.filename(), next, none);
  if (!none) fs::rename(next, link, none);
  if (none) fs::remove(next, none);
}

void mend_latest(const fs::path& prefix) {
  const auto link = latest_name(prefix);
  std::error_code none;
  if (!fs::is_symlink(link, none) || is_there(link)) return;
  if (const auto left = latest(prefix)) return link_latest(*left);
  fs::remove(link, none);
}

void expect_usable(const fs::path& prefix) {
  if (!prefix.has_filename()) {
    throw UsageError("the prefix {} is a folder; add the beginning of the names that checkpoints in it get", prefix);
  }
  if (const auto object = object_path(prefix); object && prefix.string().starts_with("s3:") && object->name.find('/') == std::string::npos) {
    throw UsageError("{0} names a bucket and nothing in it; write {0}/NAME", prefix);
  }
  const NewFolder trial(fmt::format("{}-trial-{:08x}", prefix.string(), std::random_device()()));
}

}  // namespace tessera::checkpoint
