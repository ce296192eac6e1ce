#include "tessera/checkpoint/merge.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/torch_file.h"
#include "tessera/checkpoint/model_source.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

void remove(const fs::path& checkpoint, const Catalog& catalog) {
  if (fs::is_directory(checkpoint)) {
    fs::remove_all(checkpoint);
  } else {  // a file, or several with one prefix
    for (const auto& file : catalog.files) fs::remove(file);
  }
}

}  // namespace

Merged merge(const fs::path& checkpoint, const fs::path& out, const MergeOptions& options) {
  if (options.dtype && !at::isFloatingType(*options.dtype)) {
    throw UsageError(fmt::format("weights can't be merged as {}: give a dtype of numbers with fractions", c10::toString(*options.dtype)));
  }
  const ModelSource source(checkpoint, out, options.dtype, options.progress);
  Merged result{.tensors = std::ssize(source.entries()), .bytes = source.bytes()};
  if (options.unsafe_serialization) {
    std::error_code error;
    fs::create_directories(out, error);
    if (error) throw IoError(fmt::format("can't create the folder {}: {}", out.string(), error.message()));
    result.files = {out / "pytorch_model.bin"};
    TorchFileWriter writer(result.files.front(), source.tree());
    source.write_to(writer);
  } else {
    HubWriter writer(out, source.entries(), source.metadata(), options.max_shard_size);
    source.write_to(writer);
    result.files = writer.files();
  }
  if (options.remove_checkpoint_dir) remove(checkpoint, source.catalog());
  return result;
}

}  // namespace tessera::checkpoint
