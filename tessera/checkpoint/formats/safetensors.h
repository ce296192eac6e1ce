// Files of named tensors in the safetensors format, as Python's package of that name reads and writes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tessera/base/fd.h"
#include "tessera/base/atomic_write.h"

namespace tessera::checkpoint {

/// A tensor in a file. dtypes: float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8, bool.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;

  int64_t bytes() const;
};

/// An open file whose complete header has been checked against the file's size. The constructor throws IoError if the file is damaged or
/// has another format.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  /// The names in the order in which the tensors lie in the file.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return places_.contains(name); }
  const SafetensorsEntry& info(const std::string& name) const { return place(name).entry; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// Reads a tensor into new memory on the CPU.
  at::Tensor read(const std::string& name) const;

 private:
  struct Place {
    SafetensorsEntry entry;
    uint64_t begin = 0;  // in bytes from the beginning of the data
  };
  const Place& place(const std::string& name) const;
  void read_header(const std::string& header);
  void expect_gapless(uint64_t data_bytes);
  void read_bytes(void* to, uint64_t count, uint64_t offset) const;

  std::filesystem::path path_;
  Fd fd_;
  uint64_t data_ = 0;  // where the data begins in the file
  std::map<std::string, Place> places_;
  std::vector<std::string> names_;
  std::map<std::string, std::string> metadata_;
};

/// Writes tensors one after the other, in the order of `entries`. The file appears under its name only when close() is called.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsEntry> entries,
                    const std::map<std::string, std::string>& metadata = {});

  void write(const at::Tensor& tensor);
  void close();

 private:
  std::filesystem::path path_;
  std::vector<SafetensorsEntry> entries_;
  size_t next_ = 0;
  NewFile file_;
};

}  // namespace tessera::checkpoint
