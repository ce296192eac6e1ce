// Files of named tensors in the safetensors format, as Python's package of that name reads and writes them. In files that we write, every
// tensor has a checksum, which Python's package ignores.
#pragma once

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/base/input_file.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/formats/next_tensors.h"
#include "tessera/checkpoint/formats/reserved.h"
#include "tessera/checkpoint/formats/safetensors_header.h"

namespace tessera::checkpoint {

struct Catalog;

/// An open file whose complete header has been checked against the file's size. The constructor throws IoError if the file is damaged or
/// has another format.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(InputFile file);
  explicit SafetensorsFile(std::filesystem::path path) : SafetensorsFile(InputFile(std::move(path))) {}

  const std::filesystem::path& path() const { return file_.path(); }
  const InputFile& file() const { return file_; }
  /// The tensors, or their names, in the order of the file.
  const std::vector<SafetensorsHeader::Place>& places() const { return header_.places; }
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return index_.contains(name); }
  const SafetensorsEntry& info(const std::string& name) const { return place(name).entry; }
  bool has_checksum(const std::string& name) const { return !place(name).checksum.empty(); }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// The number of bytes in the file before the data, and the checksum of these bytes.
  uint64_t header_bytes() const { return data_; }
  uint64_t header_checksum() const { return header_checksum_; }
  /// Where the bytes of a tensor begin in the file.
  uint64_t offset(const std::string& name) const { return data_ + place(name).begin; }
  /// Empty if the tensor has no checksum.
  const std::string& checksum(const std::string& name) const { return place(name).checksum; }

  /// Reads a tensor into new memory on the CPU. Throws IoError if its bytes are not those that were written.
  at::Tensor read(const std::string& name) const;
  /// Throws IoError if a tensor's bytes are not those that were written. Reads nothing in files of other programs, which have no checksums.
  void verify(const std::string& name) const;

 private:
  using Place = SafetensorsHeader::Place;
  const Place& place(const std::string& name) const;
  void read_header();
  /// Reads a tensor block by block, each block to the address that `target` returns, and compares the checksum.
  void read_blocks(const Place& place, c10::function_ref<std::byte*(uint64_t begin)> target) const;

  InputFile file_;
  uint64_t data_ = 0;  // where the data begins in the file
  uint64_t header_checksum_ = 0;
  SafetensorsHeader header_;
  std::unordered_map<std::string, size_t> index_;  // into header_.places
};

/// Reads a safetensors file. Throws UsageError if it is one rank's file of a checkpoint.
Catalog read_safetensors(const std::filesystem::path& path);
/// Adds the file and its tensors. If the value of a metadata key is the name of a tensor in the file, the key is an alias of that tensor.
void add_safetensors(Catalog& catalog, const SafetensorsFile& file);

/// Sorts the tensors of one file: the widest dtype comes first, so that every value is aligned to its width for programs that map the file
/// into memory.
void sort_by_width(auto& tensors, const auto& dtype_of) {
  std::ranges::stable_sort(tensors, std::greater{}, [&](const auto& tensor) { return c10::elementSize(dtype_of(tensor)); });
}

/// Writes tensors one after the other, in the order of `entries`. The file appears under its name only when close() is called.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsEntry> entries,
                    const std::map<std::string, std::string>& metadata = {});

  void write(const at::Tensor& tensor);
  /// Writes the next values, in row-major order, of a tensor that comes in pieces. Returns whether they were its last.
  bool append(const at::Tensor& values);
  /// Instead of write() and append(): reserves bytes for each tensor, which other processes fill.
  std::vector<ReservedBytes> reserve();
  /// Calls NewFile::set_aside(), for writers of many files that other processes fill.
  void set_aside() { file_.set_aside(); }
  /// Completes the file. After reserve(), takes the checksums of all tensors, in the order of the entries.
  void close(std::span<const std::string> checksums = {});

 private:
  /// Reads the file back from the object store, which Tessera does not control. Throws IoError unless the store has the bytes that were
  /// written.
  void expect_stored() const;

  std::filesystem::path path_;
  NextTensors tensors_;
  SafetensorsHeaderText header_;
  std::string checksums_;  // checksums of the header and of the tensors written so far
  std::optional<Checksum> checksum_;
  NewFile file_;
};

}  // namespace tessera::checkpoint
