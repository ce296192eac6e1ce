// InputFile: reads a file, or bytes that a function provides, at any offset.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "tessera/base/fd.h"

namespace tessera {

/// Every failure is an IoError.
class InputFile {
 public:
  /// Throws for pipes, folders and the like.
  explicit InputFile(std::filesystem::path path);
  /// For bytes that are in no file: `read` copies `count` of them, from `offset` on. Errors name the input `name`.
  using Read = std::function<void(void* to, uint64_t count, uint64_t offset)>;
  InputFile(std::filesystem::path name, uint64_t size, Read read) : path_(std::move(name)), size_(size), read_(std::move(read)) {}

  const std::filesystem::path& path() const { return path_; }
  /// The size in bytes, when the file was opened.
  uint64_t size() const { return size_; }
  void read(void* to, uint64_t count, uint64_t offset) const;
  /// Returns the first `count` bytes. Throws if the file has fewer.
  std::string read_first(uint64_t count) const;
  std::string read_all() const { return read_first(size_); }

 private:
  std::filesystem::path path_;
  Fd fd_;
  uint64_t size_ = 0;
  Read read_;
};

}  // namespace tessera
