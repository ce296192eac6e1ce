#include "tessera/checkpoint/merge.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/stored/catalogs.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw IoError(fmt::format("can't create the folder {}: {}", folder.string(), error.message()));
}

/// Folders are removed with all that is in them; otherwise they are a file, or several with one prefix.
void remove(const fs::path& checkpoint, const std::vector<fs::path>& files) {
  std::error_code error, none;
  if (fs::is_directory(checkpoint, none)) {
    const auto folder = fs::canonical(checkpoint, error);  // not a link to it, such as PREFIX-latest
    if (!error) fs::remove_all(folder, error);
  } else {
    for (const auto& file : files) {
      if (!error) fs::remove(file, error);
    }
  }
  if (error) throw IoError(fmt::format("all is written, but {} can't be removed: {}", checkpoint.string(), error.message()));
}

/// Other programs take safetensors where there are both.
void expect_no_safetensors(const fs::path& out) {
  if (!is_hub_folder(out)) return;
  throw UsageError(
      fmt::format("{} has a model in safetensors already, which programs would take in place of pytorch_model.bin; remove it, or "
                  "write elsewhere",
                  out.string()));
}

}  // namespace

Merged merge(const fs::path& checkpoint, const fs::path& out, const MergeOptions& options) {
  ConvertOptions how{.to = Format::Hub,
                     .weights_only = true,
                     .dtype = options.dtype,
                     .max_shard_size = options.max_shard_size,
                     .progress = options.progress};
  auto to = out;
  if (options.unsafe_serialization) {
    how.to = Format::Torch;
    to = out / "pytorch_model.bin";
    expect_no_safetensors(out);
    make_folder(out);
  }
  const auto files = options.remove_checkpoint_dir ? read_model(checkpoint).files : std::vector<fs::path>();
  const auto done = convert(checkpoint, to, how);
  if (options.remove_checkpoint_dir) remove(checkpoint, files);
  return {.files = done.files, .tensors = done.tensors, .bytes = done.bytes};
}

}  // namespace tessera::checkpoint
