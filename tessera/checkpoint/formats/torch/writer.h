// Archives as torch.save writes them, tensor by tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/checkpoint/formats/next_tensors.h"
#include "tessera/checkpoint/formats/pickle/pickle.h"
#include "tessera/checkpoint/formats/torch/zip.h"

namespace tessera::checkpoint {

/// Appends an archive to a file.
class TorchArchiveWriter {
 public:
  /// Begins the archive at byte `begin` of the file. `content` is a tree that has the dtypes and shapes of tensors; write() adds their
  /// values. The number of a save becomes an entry of its own, which torch.load ignores. Throws UsageError if the tree has something that
  /// can't be saved.
  TorchArchiveWriter(NewFile& file, uint64_t begin, const pickle::Value& content, std::optional<uint64_t> save = {});

  /// Writes the next tensor in the order of the tree. A tied tensor comes once, at its first place.
  void write(const at::Tensor& tensor);
  /// Writes the next values, in row-major order, of a tensor that comes in pieces.
  void append(const at::Tensor& values);
  /// Instead of write() and append(): returns where in the file other processes write each tensor.
  std::vector<uint64_t> reserve();
  /// Completes the archive and returns its length in bytes. After reserve(), takes the CRC-32 of each tensor. Throws UsageError if tensors
  /// are missing.
  uint64_t close(std::span<const uint32_t> checksums = {});
  /// ZipArchive::checksum of the closed archive.
  const std::string& checksum() const { return zip_.checksum(); }

 private:
  /// Returns the value with each tensor replaced by the call that makes it in Python.
  pickle::Value with_calls(const pickle::Value& value, const std::string& name);
  pickle::Value call_of(const pickle::Tensor& tensor, const std::string& name);

  ZipWriter zip_;
  size_t first_reserved_ = 0;  // the number of the first reserved entry
  std::vector<SafetensorsEntry> entries_;
  std::unordered_map<const pickle::Tensor*, size_t> storages_;  // into entries_
  std::optional<NextTensors> tensors_;
};

}  // namespace tessera::checkpoint
