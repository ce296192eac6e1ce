#include "tessera/checkpoint/merge.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/convert.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw IoError(fmt::format("can't create the folder {}: {}", folder.string(), error.message()));
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
  const auto done = convert(checkpoint, to, how);
  if (options.remove_checkpoint_dir) fs::remove_all(checkpoint);
  return {.files = done.files, .tensors = done.tensors, .bytes = done.bytes};
}

}  // namespace tessera::checkpoint
