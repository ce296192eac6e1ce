// Presets of convert(): merge, consolidate and reshard.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/base/storage.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/format_table.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/merge.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Throws UsageError if the folder holds a file that is not a part of its checkpoint: it would be removed with the checkpoint.
void expect_only_parts(const fs::path& folder, const std::set<fs::path>& parts, bool is_accelerates) {
  for (const auto& name : names_in(folder).value_or(std::vector<std::string>())) {
    const auto path = folder / name;
    std::error_code unknown;
    if (fs::is_directory(path, unknown)) {
      expect_only_parts(path, parts, is_accelerates);
    } else if (!is_part(name) && !(is_accelerates && is_accelerate_file(name)) && !parts.contains(fs::weakly_canonical(path, unknown))) {
      throw UsageError(
          "{} is not part of the checkpoint, but would be removed with it; move the file elsewhere, or keep the checkpoint. "
          "Nothing was written",
          path);
    }
  }
}

/// Returns the paths that make up a checkpoint: its folder, its file, or the rank files of torch_xla.
std::vector<fs::path> removable(const fs::path& checkpoint) {
  if (object_path(checkpoint))
    throw UsageError("{} is in a store, from which merge removes nothing; leave remove_checkpoint_dir out", checkpoint);
  const auto format = format_of(checkpoint);
  const auto files = read_catalog(checkpoint).files;
  std::error_code unknown;
  if (format == Format::TorchXla || !fs::is_directory(checkpoint, unknown)) return files;
  std::set<fs::path> parts;
  for (const auto& file : files) parts.insert(fs::weakly_canonical(file, unknown));
  expect_only_parts(checkpoint, parts, format == Format::Accelerate);
  // If the path is a link, remove its target, and the link too, unless it is PREFIX-latest, which mend_latest() redirects.
  std::vector<fs::path> all = {fs::canonical(checkpoint, unknown)};
  const auto name = checkpoint.has_filename() ? checkpoint : checkpoint.parent_path();
  if (fs::is_symlink(name, unknown) && !name.string().ends_with("-latest")) all.push_back(name);
  return all;
}

/// Warns of the checkpoint's extra tensors outside the model, which are not written.
void warn_of_tensors_beside(const fs::path& checkpoint, const Converted& done) {
  std::vector<std::string> names;
  for (const auto& [name, why] : done.left_out) {
    if (why == kStandsBeside) names.push_back(name);
  }
  if (!names.empty()) log(LogLevel::Warning, "only the model of {} is written, without its extra tensors: {}", checkpoint, some_of(names));
}

}  // namespace

Converted merge(const fs::path& checkpoint, const fs::path& out, const MergeOptions& options) {
  ConvertOptions how{.to = Format::Hub,
                     .weights_only = true,
                     .dtype = options.dtype,
                     .max_shard_size = options.max_shard_size,
                     .progress = options.progress};
  expect_no_run(out);
  const auto old = options.remove_checkpoint_dir ? removable(checkpoint) : std::vector<fs::path>();
  auto to = out;
  if (options.unsafe_serialization) {
    how.to = Format::Torch;
    to = out / "pytorch_model.bin";
    if (is_hub_folder(out, kHubSafetensors))
      throw UsageError(
          "{} has a model in safetensors already, which programs would take in place of pytorch_model.bin; remove it, or write elsewhere",
          out);
    expect_free_for_model(out);
    make_folder(out);
  }
  auto done = convert(checkpoint, to, how);
  warn_of_tensors_beside(checkpoint, done);
  for (const auto& each : old) {
    std::error_code error;
    fs::remove_all(each, error);
    if (error) throw IoError("all is written, but {} can't be removed: {}", each, error.message());
    if (const auto prefix = prefix_of(each)) mend_latest(*prefix);
  }
  return done;
}

void expect_known_ending(const fs::path& save_path) {
  if (!row_of(Format::Torch).has_ending(save_path)) expect_ending_of(save_path, Format::Safetensors);
}

fs::path consolidated_name(const fs::path& prefix) {
  return prefix.string() + "_consolidated" + (object_path(prefix) ? ".safetensors" : ".pth");
}

Converted consolidate(const fs::path& checkpoint, const fs::path& save_path, const ConvertProgress& progress) {
  expect_known_ending(save_path);
  const bool is_torch = row_of(Format::Torch).has_ending(save_path);
  auto done = convert(checkpoint, save_path,
                      {.to = is_torch ? Format::Torch : Format::Safetensors,
                       .weights_only = true,
                       .model_key = is_torch ? "model" : "",
                       .progress = progress});
  warn_of_tensors_beside(checkpoint, done);
  return done;
}

Converted consolidate(const fs::path& checkpoint, const fs::path& save_path, const Communicator& world) {
  constexpr Subject kSubject{.unit = "consolidation"};
  const auto failure = fmt::format("could not consolidate {}", checkpoint.string());
  Converted done;
  all_or_none(world, kSubject, failure, [&] {
    if (world.is_first()) done = consolidate(checkpoint, save_path);
  });
  all_or_none(world, kSubject, failure, [&] {
    if (is_there(save_path)) return;
    throw IoError("{} was written by rank 0, but another rank does not see it; give all ranks the same path, where all see the same files",
                  save_path);
  });
  const auto numbers = world.texts(nlohmann::json({done.parameters, done.tensors, done.bytes}).dump(), kSubject);
  std::tie(done.parameters, done.tensors, done.bytes) = nlohmann::json::parse(numbers.front()).get<std::tuple<int64_t, int64_t, int64_t>>();
  done.files = {save_path};
  return done;
}

Converted reshard(const fs::path& checkpoint, const fs::path& out, int world) {
  return convert(checkpoint, out, {.to = Format::Tessera, .world = world});
}

}  // namespace tessera::checkpoint
