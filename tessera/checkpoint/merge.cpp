#include "tessera/checkpoint/merge.h"

#include <set>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/catalogs.h"

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
          "{} is no part of the checkpoint, with which it would be removed; put it elsewhere, or leave the checkpoint where it "
          "is. Nothing was written",
          path);
    }
  }
}

/// Returns the paths to remove with a checkpoint: its folder, its file, or its files with one prefix.
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
  // The folder itself, not a link to it. PREFIX-latest will lead elsewhere; other links are removed with their target.
  std::vector<fs::path> all = {fs::canonical(checkpoint, unknown)};
  const auto name = checkpoint.has_filename() ? checkpoint : checkpoint.parent_path();
  if (fs::is_symlink(name, unknown) && !name.string().ends_with("-latest")) all.push_back(name);
  return all;
}

void remove(const std::vector<fs::path>& all) {
  for (const auto& each : all) {
    std::error_code error;
    fs::remove_all(each, error);
    if (error) throw IoError("all is written, but {} can't be removed: {}", each, error.message());
    if (const auto prefix = prefix_of(each)) mend_latest(*prefix);
  }
}

/// Throws UsageError if there is a model in safetensors, which other programs would take instead.
void expect_no_safetensors(const fs::path& out) {
  if (!is_hub_folder(out, kHubSafetensors)) return;
  throw UsageError(
      "{} has a model in safetensors already, which programs would take in place of pytorch_model.bin; remove it, or "
      "write elsewhere",
      out);
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
    expect_no_safetensors(out);
    expect_free_for_model(out);
    make_folder(out);
  }
  auto done = convert(checkpoint, to, how);
  warn_of_tensors_beside(checkpoint, done);
  remove(old);
  return done;
}

}  // namespace tessera::checkpoint
