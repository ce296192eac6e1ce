// Archives as torch.save writes them, tensor by tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/checkpoint/formats/pickle/pickle.h"
#include "tessera/checkpoint/formats/torch/zip.h"

namespace tessera::checkpoint {

struct TorchTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape = {};
};

/// The content of a file: dicts and lists of tensors and plain values. A tensor whose pointer is in several places is a tied one, which is
/// written once.
struct TorchTree {
  using Key = std::variant<std::string, int64_t>;
  using Tensor = std::shared_ptr<const TorchTensor>;
  struct Dict {
    std::vector<std::pair<Key, TorchTree>> entries = {};
  };
  struct List {
    std::vector<TorchTree> items = {};
  };
  struct Tuple {
    std::vector<TorchTree> items = {};
  };
  std::variant<nlohmann::json, Tensor, Dict, List, Tuple> value = {};
};

/// Appends an archive to a file.
class TorchArchiveWriter {
 public:
  /// The archive begins at byte `begin` of the file. The number of a save becomes an entry of its own, which torch.load ignores. Throws
  /// UsageError if the tree has something that can't be saved.
  TorchArchiveWriter(NewFile& file, uint64_t begin, const TorchTree& tree, std::optional<uint64_t> save = {});

  /// Writes the next tensor in the order of the tree. A tied tensor comes once, at its first place.
  void write(const at::Tensor& tensor);
  /// The same for a tensor that comes in pieces: its next values, in row-major order.
  void append(const at::Tensor& values);
  /// Instead of write(), append() and close(): returns where in the file others write each tensor.
  std::vector<uint64_t> reserve();
  /// Returns the length of the archive in bytes. Throws UsageError if tensors are missing.
  uint64_t close();
  /// Closes an archive that has been filled, with the CRC-32 of each tensor.
  uint64_t close(std::span<const uint32_t> checksums);
  /// ZipArchive::checksum of the closed archive.
  const std::string& checksum() const { return zip_.checksum(); }

 private:
  struct Place {
    std::string name;
    TorchTree::Tensor tensor;
  };
  pickle::Value pickled(const TorchTree& tree, const std::string& name);
  pickle::Value pickled(const TorchTree::Tensor& tensor, const std::string& name);

  ZipWriter zip_;
  size_t first_reserved_ = 0;  // the number of the entry
  std::vector<Place> places_;  // by the number of the storage
  std::unordered_map<const TorchTensor*, size_t> storages_;
  size_t next_ = 0;
  int64_t written_ = 0;  // values of the next tensor
};

}  // namespace tessera::checkpoint
