// Writes only the model of a run, in files of safetensors.
#include <memory>

#include "tessera/base/folder.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/convert/fill.h"
#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/hub.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

std::vector<SourceTensor> by_width(const RunSource& source) {
  auto tensors = source.model();
  sort_by_width(tensors, [](const SourceTensor& tensor) { return tensor.dtype; });
  return tensors;
}

std::vector<SafetensorsEntry> entries_of(const std::vector<SourceTensor>& tensors) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& tensor : tensors) entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .sizes = tensor.shape});
  return entries;
}

std::map<std::string, std::string> metadata_of(const RunSource& source) {
  auto metadata = source.run().catalog.aliases;
  metadata["format"] = "pt";
  // A single file can't be mixed with files of another save, so it needs no number of its save.
  if (source.options().to != Format::Safetensors) metadata[kSaveKey] = std::to_string(source.run().save);
  return metadata;
}

/// Writes one tensor after the other, because in an object store no bytes can be reserved.
void write_in_order(const RunSource& source, const std::vector<SourceTensor>& tensors, auto& writer) {
  for (const auto& tensor : tensors) source.copy(tensor, [&](const at::Tensor& values) { writer.append(values); });
  writer.close();
}

}  // namespace

std::vector<fs::path> write_safetensors(const RunSource& source, const fs::path& out) {
  const auto tensors = by_width(source);
  const auto make = [&] {
    make_folder(out.parent_path());
    return std::make_unique<SafetensorsWriter>(out, entries_of(tensors), metadata_of(source));
  };
  if (object_path(out)) {
    write_in_order(source, tensors, *make());
  } else {
    write_reserved(source, tensors, DigestKind::Xxh3, make);
  }
  return {out};
}

std::vector<fs::path> write_hub(const RunSource& source, const fs::path& out) {
  const auto tensors = by_width(source);
  const auto make = [&] {
    return std::make_unique<HubWriter>(out, entries_of(tensors), metadata_of(source), source.options().max_shard_size);
  };
  if (object_path(out)) {
    const auto writer = make();
    write_in_order(source, tensors, *writer);
    return writer->files();
  }
  const auto writer = write_reserved(source, tensors, DigestKind::Xxh3, make);
  return writer ? writer->files() : std::vector<fs::path>();
}

}  // namespace tessera::checkpoint
