// TorchArchive: the content of an archive of torch.save, and where the values of its tensors are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/input_file.h"
#include "tessera/checkpoint/formats/damage.h"
#include "tessera/checkpoint/formats/pickle/pickle.h"
#include "tessera/checkpoint/formats/torch/zip.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

/// A tensor that is stored as a view of an entry of the archive.
struct ArchivedTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape = {}, strides = {};
  uint64_t begin = 0;  // in the file
  ZipEntry storage = {};

  /// Returns where the values of `box` are in the file, given that this ArchivedTensor holds exactly the values of that box of a larger
  /// tensor.
  StoredBox stored_in(size_t file, TensorSlice box) const {
    return {.box = std::move(box), .file = file, .offset = begin, .strides = strides};
  }
  StoredBox stored_in(size_t file) const { return stored_in(file, whole_slice(shape)); }
  /// Adds the checksum of the storage, if it has one, to the catalog.
  void add_checksum(Catalog& catalog, size_t file, const std::string& name) const;
};

class TorchArchive {
 public:
  /// Reads the archive in these bytes of a file. Throws IoError, which begins with `where`, if the archive is damaged, was not made by
  /// torch.save, or refers to a global that `globals` refuses.
  TorchArchive(const InputFile& file, uint64_t begin, uint64_t bytes, const pickle::Globals& globals, std::string where);
  /// Reads a file that is one archive. Accepts any global, because the reader calls none: objects of any class may be saved with tensors.
  explicit TorchArchive(const InputFile& file);

  const pickle::Value& content() const { return content_; }
  /// The size of the pickle in bytes, without tensors.
  size_t content_bytes() const { return content_bytes_; }
  /// ZipArchive::checksum.
  const std::string& checksum() const { return checksum_; }
  /// The number of the save, if the archive has one (kSaveKey).
  std::optional<uint64_t> save() const { return save_; }
  /// Returns the tensor that a value describes, or nothing if the value is not a tensor. Throws IoError if the tensor is damaged, or of a
  /// kind that Tessera can't read.
  std::optional<ArchivedTensor> tensor(const pickle::Value& value, const std::string& name) const;

 private:
  ArchivedTensor view_of_storage(const pickle::Value& made, bool names_dtype, const std::string& name, const Damage& damaged) const;
  const ZipEntry& storage(const pickle::Value& value, std::optional<at::ScalarType>& dtype, const Damage& damaged) const;

  std::string where_, folder_;
  std::map<std::string, ZipEntry> entries_;
  std::string checksum_;
  std::optional<uint64_t> save_;
  pickle::Value content_;
  size_t content_bytes_ = 0;
};

}  // namespace tessera::checkpoint
