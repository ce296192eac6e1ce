#include "tessera/checkpoint/live/save.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/base/pinned_memory.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/live/beside.h"
#include "tessera/checkpoint/live/contents.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/forward_phase.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

uint64_t draw_number(const Communicator& world) {
  std::random_device source;
  const uint32_t drawn = source() | 1U << 31;                  // ten digits, so that two saves of one state have files of equal size
  return world.extremes(drawn, {.unit = "checkpoint"}).least;  // runs on the hosts: a device may have long work queued
}

/// Whether the folder has no other files than those that a save writes.
bool is_of_a_save(const fs::path& folder) {
  return std::ranges::all_of(names_in(folder).value_or(std::vector<std::string>()), [](std::string_view name) {
    if (name.ends_with(".part")) name.remove_suffix(std::string_view(".part").size());
    return name == kManifestFile || has_rank_file_name(name);
  });
}

/// Frees the name of an incomplete checkpoint, so that a run which has resumed from an earlier checkpoint can save under this name.
void make_way(const fs::path& folder, bool in_place) {
  if (object_path(folder) && is_complete(folder))  // even if the store does not list it yet
    throw IoError("there is a {} already; save under another name, or remove it", folder);
  if (!is_folder(folder)) return;
  std::error_code unknown;
  const auto why = why_incomplete(folder);
  if (fs::is_empty(folder, unknown)) {
    fs::remove(folder, unknown);
    return;
  }
  if (!why || fs::is_symlink(folder, unknown) || !is_of_a_save(folder)) return;  // NewFolder will throw
  if (in_place && !is_there(folder / kManifestFile)) {                           // left by an interrupted save
    remove_tree(folder);
    return;
  }
  if (object_path(folder)) throw IoError("{} is not a complete checkpoint ({}), and a store can't rename it; remove it", folder, *why);
  set_aside(folder, *why);
}

/// Brings tensors to the host one after the other. While a tensor is written, the next tensor is copied from its device.
class Staging {
 public:
  explicit Staging(const std::vector<std::pair<std::string, at::Tensor>>& tensors) : tensors_(tensors) { begin(0); }

  at::Tensor take(size_t i) {
    begin(i + 1);
    const auto& place = places_[i % 2];
    place.copied.synchronize();
    return place.values;
  }

 private:
  struct Place {
    at::Tensor pinned;  // kept to be used again
    at::Tensor values;
    Event copied;
  };

  void begin(size_t i) {
    if (i == tensors_.size()) return;
    const auto tensor = tensors_[i].second.detach();
    auto& place = places_[i % 2];
    place.values = tensor;
    place.copied = {};
    if (!has_pinned_memory(tensor.device()) || tensor.numel() == 0) return;
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (!place.pinned.defined() || place.pinned.numel() < bytes) place.pinned = empty_pinned({bytes}, at::kByte, tensor.device());
    place.values = place.pinned.narrow(0, 0, bytes).view(tensor.scalar_type()).view(tensor.sizes());
    place.copied = copy_to_pinned(tensor, place.values);
  }

  const std::vector<std::pair<std::string, at::Tensor>>& tensors_;
  Place places_[2];
};

void write_rank_file(const fs::path& folder, const RankContents& rank, c10::function_ref<void()> moved) {
  const auto& record = rank.record;
  if (!object_path(folder) && !is_there(folder)) {
    throw IoError("rank 0 has made the folder {}, but rank {} does not see it; save where all ranks see the same files", folder,
                  record.rank);
  }
  SafetensorsWriter writer(rank_file(folder, record.rank, record.ranks), entries_of(rank), to_metadata(record));
  Staging staging(rank.tensors);
  for (size_t i = 0; i < rank.tensors.size(); i++) {
    writer.write(staging.take(i));
    moved();
  }
  writer.close();
}

/// Throws UsageError for contents that can't be saved, or not with these options.
void expect_sound(const fs::path& folder, const Contents& contents, const SaveOptions& options) {
  expect_model(contents);
  if (folder.empty()) throw UsageError("a checkpoint needs a folder; this name is empty");
  expect_text(contents.notes);
  expect_savable_beside(contents);
  if (!options.keep) return;
  const auto& keep = *options.keep;
  expect_sensible(keep);
  if (!prefix_of(folder)) {
    throw UsageError("SaveOptions::keep is for the folders of a run, PREFIX-step-N, and this one is {}", folder);
  }
  if (keep.best > 0 && !contents.notes.contains(keep.metric)) {
    throw UsageError("Keep::best compares the note '{}', which this checkpoint does not have; add it to Contents::notes", keep.metric);
  }
}

}  // namespace

/// Removes a slash at the end, too: "run/net/" is "run/net".
fs::path lasting_name(const fs::path& folder) {
  const auto named = folder.has_filename() ? folder : folder.parent_path();
  return named.empty() || object_path(named) ? named : fs::absolute(named);
}

uint64_t expect_savable(const fs::path& folder, const Contents& contents, const Communicator& world, const SaveOptions& options,
                        const std::string& failure) {
  expect_idle("checkpoint::save");
  const auto number = draw_number(world);
  LocalValues model;
  all_or_none(world, {.unit = "checkpoint"}, failure, [&] {
    expect_sound(folder, contents, options);
    model = local_values(*contents.model);
    const auto names = names_of(model, /*may_be_missing=*/{});
    for (const auto& name : names.all) expect_writable_name(name);
  });
  expect_one_value_each(model, world, "a save");
  expect_same_beside(contents, world);
  return number;
}

Save::Save(const fs::path& folder, const Contents& contents, const Communicator& world, const SaveOptions& options)
    : folder_(lasting_name(folder)),
      working_(options.in_place ? folder_ : unfinished_path(folder_)),
      ranks_(world.size()),
      options_(options) {
  number_ = expect_savable(folder_, contents, world, options, failure());
  all_or_none(world, {.unit = "checkpoint"}, failure(), [&] {
    if (options.format != Format::Tessera)
      throw UsageError("AsyncSaver writes Tessera's format, not {}; save with checkpoint::save", name_of(options.format));
    if (!world.is_first()) return;
    std::optional<NamedLock> lock;
    if (!object_path(folder_)) lock.emplace(lock_place(folder_));
    make_way(folder_, options.in_place || object_path(folder_));
    made_.emplace(folder_, working_, std::move(lock));
  });
}

void Save::write(const std::vector<RankContents>& ranks, c10::function_ref<void()> moved) const {
  for (const auto& rank : ranks) write_rank_file(working_, rank, moved);
}

std::optional<fs::path> Save::missing_file() const {
  for (int rank = 0; rank < ranks_; rank++) {
    if (const auto file = rank_file(working_, rank, ranks_); !size_of_file(file)) return file;
  }
  return {};
}

void Save::commit() {
  if (!made_) return;
  write_manifest(working_, manifest_of_files(working_, ranks_));
  try {
    made_->commit();
  } catch (const IoError& error) {
    if (options_.in_place || is_there(folder_)) throw;
    throw IoError("{}; where folders can't be renamed, save with SaveOptions::in_place", error.what());
  }
  made_.reset();
  const auto prefix = prefix_of(folder_);
  if (!prefix) return;
  // The checkpoint is safe at this point: errors with other files do not stop the run.
  try {
    link_latest(folder_);
    if (options_.keep) prune(*prefix, *options_.keep, folder_);
  } catch (const std::exception& error) {
    log(LogLevel::Warning, "{} is saved, but: {}", folder_, error.what());
  }
}

void Save::abandon() {
  if (made_) made_->abandon();
}

std::string Save::commit_failure() const {
  return fmt::format("could not save {}", folder_.string());
}

std::string Save::failure() const {
  return fmt::format("could not save {}; nothing of this save was kept", folder_.string());
}

}  // namespace tessera::checkpoint
