#include "tessera/checkpoint/merge.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/convert.h"
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
  if (fs::is_directory(checkpoint)) {
    fs::remove_all(checkpoint);
  } else {
    for (const auto& file : files) fs::remove(file);
  }
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
    make_folder(out);
  }
  const auto files = options.remove_checkpoint_dir ? read_model(checkpoint).files : std::vector<fs::path>();
  const auto done = convert(checkpoint, to, how);
  if (options.remove_checkpoint_dir) remove(checkpoint, files);
  return {.files = done.files, .tensors = done.tensors, .bytes = done.bytes};
}

}  // namespace tessera::checkpoint
