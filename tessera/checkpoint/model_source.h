// ModelSource: the model in a checkpoint of any format, to be written into other files tensor by tensor.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/catalog.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/formats/torch_writer.h"
#include "tessera/checkpoint/merge.h"

namespace tessera::checkpoint {

class ModelSource {
 public:
  /// Everything is checked before anything is written. Throws UsageError if what is written to `out` could replace files of the checkpoint,
  /// and IoError if values are missing or damaged.
  ModelSource(const std::filesystem::path& checkpoint, const std::filesystem::path& out, std::optional<at::ScalarType> dtype,
              MergeProgress progress);

  const Catalog& catalog() const { return stored_.catalog(); }
  /// In the order in which they are written, tied ones once.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  /// The widest dtype first, so that every value is aligned to its width for programs that map the file into memory.
  void sort_by_width();
  int64_t bytes() const { return all_; }

  /// The metadata of safetensors files, and the tree of a file of torch.save.
  std::map<std::string, std::string> metadata() const;
  TorchTree tree() const;

  template <class Writer>
  void write_to(Writer& writer) const {
    int64_t bytes = 0;
    for (const auto& entry : entries_) {
      writer.write(stored_.read(entry.name).to(entry.dtype));
      bytes += entry.bytes();
      if (progress_) progress_(entry.name, bytes, all_);
    }
    writer.close();
  }

 private:
  CatalogReader stored_;
  MergeProgress progress_;
  std::vector<SafetensorsEntry> entries_;
  int64_t all_ = 0;
};

}  // namespace tessera::checkpoint
