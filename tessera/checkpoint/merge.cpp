#include "tessera/checkpoint/merge.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/catalogs.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/torch_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// The tensors of a model in the order in which they are written, and tied ones once.
class Source {
 public:
  Source(Catalog catalog, const MergeOptions& options) : stored_(std::move(catalog)), options_(options) {
    for (const auto& [name, tensor] : stored_.catalog().tensors) {
      stored_.expect_complete(name);
      const bool rounds = options.dtype && at::isFloatingType(tensor.dtype);
      entries_.push_back({.name = name, .dtype = rounds ? *options.dtype : tensor.dtype, .sizes = tensor.shape});
      all_ += entries_.back().bytes();
    }
    for (const auto& bytes : stored_.catalog().checksums) stored_.verify(bytes);
  }

  const Catalog& catalog() const { return stored_.catalog(); }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  int64_t bytes() const { return all_; }

  template <class Writer>
  void write_to(Writer& writer) const {
    int64_t bytes = 0;
    for (const auto& entry : entries_) {
      writer.write(stored_.read(entry.name).to(entry.dtype));
      bytes += entry.bytes();
      if (options_.progress) options_.progress(entry.name, bytes, all_);
    }
    writer.close();
  }

 private:
  CatalogReader stored_;
  const MergeOptions& options_;
  std::vector<SafetensorsEntry> entries_;
  int64_t all_ = 0;
};

TorchTree tree_of(const Source& source) {
  TorchTree::Dict dict;
  std::map<std::string, TorchTree::Tensor> tensors;
  for (const auto& entry : source.entries()) {
    tensors[entry.name] = std::make_shared<TorchTensor>(TorchTensor{.dtype = entry.dtype, .shape = entry.sizes});
    dict.entries.emplace_back(entry.name, TorchTree{tensors[entry.name]});
  }
  for (const auto& [alias, name] : source.catalog().aliases) {
    if (tensors.contains(name)) dict.entries.emplace_back(alias, TorchTree{tensors[name]});
  }
  return {std::move(dict)};
}

bool is_inside(const fs::path& path, const fs::path& folder) {
  std::error_code unknown;
  const auto inner = fs::weakly_canonical(path, unknown), outer = fs::weakly_canonical(folder, unknown);
  return !unknown && std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

}  // namespace

Merged merge(const fs::path& checkpoint, const fs::path& out, const MergeOptions& options) {
  if (is_inside(out, checkpoint)) {
    throw UsageError(
        fmt::format("{} lies in the checkpoint {}, whose files it could replace; write elsewhere", out.string(), checkpoint.string()));
  }
  if (options.dtype && !at::isFloatingType(*options.dtype)) {
    throw UsageError(fmt::format("weights can't be merged as {}: give a dtype of numbers with fractions", c10::toString(*options.dtype)));
  }
  Merged result;
  {
    const Source source(read_model(checkpoint), options);
    if (source.entries().empty()) throw IoError(fmt::format("{} has no tensors of a model", checkpoint.string()));
    result.tensors = std::ssize(source.entries());
    result.bytes = source.bytes();
    if (options.unsafe_serialization) {
      std::error_code error;
      fs::create_directories(out, error);
      if (error) throw IoError(fmt::format("can't create the folder {}: {}", out.string(), error.message()));
      result.files = {out / "pytorch_model.bin"};
      TorchFileWriter writer(result.files.front(), tree_of(source));
      source.write_to(writer);
    } else {
      auto metadata = source.catalog().aliases;
      metadata["format"] = "pt";
      HubWriter writer(out, source.entries(), std::move(metadata), options.max_shard_size);
      source.write_to(writer);
      result.files = writer.files();
    }
  }
  if (options.remove_checkpoint_dir) fs::remove_all(checkpoint);
  return result;
}

}  // namespace tessera::checkpoint
