// Reads files of torch.save (.pt, .pth, .bin) as catalogs, and writes such files. Only tensors and plain values are read: no code of the
// file runs, and objects of other classes are left out, or refused if they may be the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "tessera/checkpoint/formats/reserved.h"
#include "tessera/checkpoint/formats/torch/writer.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

/// Reads a file of Python, of libtorch (torch::save of a module, torch::pickle_save) or of TorchScript. The name of a value is the dict
/// keys and list indices that lead to it, joined by dots. A list is one value unless it has tensors or dicts in it. A tensor that is the
/// same view of a storage as an earlier tensor becomes an alias of that tensor. Throws IoError.
Catalog read_torch_file(const std::filesystem::path& path);

/// Writes a file that torch.load(weights_only=True) reads, also with mmap=True. The file appears under its name only when close() is
/// called.
class TorchFileWriter {
 public:
  TorchFileWriter(const std::filesystem::path& path, const pickle::Value& content, std::optional<uint64_t> save = {})
      : file_(path), archive_(file_, 0, content, save) {}

  void write(const at::Tensor& tensor) { archive_.write(tensor); }
  /// reserve() and close() are as in SafetensorsWriter.
  std::vector<ReservedBytes> reserve();
  void close(std::span<const std::string> checksums = {});

 private:
  NewFile file_;
  TorchArchiveWriter archive_;
};

}  // namespace tessera::checkpoint
