// Files of torch.save (.pt, .pth, .bin) as catalogs, and new ones. Only plain values and tensors are read; a file that would have Python
// run other code is refused.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "tessera/checkpoint/formats/reserved.h"
#include "tessera/checkpoint/formats/torch/writer.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

/// Reads a file of Python, of libtorch (torch::save of a module, torch::pickle_save) or of TorchScript. Names are the keys of dicts and the
/// places in lists on the way to a value, joined by dots. A list is one value unless it has tensors or dicts in it. Names that share all
/// values become aliases. Throws IoError.
Catalog read_torch_file(const std::filesystem::path& path);

/// Writes a file that torch.load(weights_only=True) reads, also with mmap=True. It appears under its name only when close() is called.
class TorchFileWriter {
 public:
  TorchFileWriter(const std::filesystem::path& path, const pickle::Value& content, std::optional<uint64_t> save = {})
      : file_(path), archive_(file_, 0, content, save) {}

  void write(const at::Tensor& tensor) { archive_.write(tensor); }
  /// As in SafetensorsWriter.
  std::vector<ReservedBytes> reserve();
  void close(std::span<const std::string> checksums = {});

 private:
  NewFile file_;
  TorchArchiveWriter archive_;
};

}  // namespace tessera::checkpoint
