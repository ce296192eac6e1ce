// The header of a safetensors file: which tensors lie where, and texts by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::checkpoint {

/// The bytes of the header's length, which stands before the header.
inline constexpr uint64_t kLengthBytes = 8;

/// A tensor in a file. Its dtype is one of those in dtype_names.cpp.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;

  int64_t bytes() const;
};

/// Throws UsageError for a name that no tensor in a file can have. This holds for all formats, because ranks describe what they write to
/// each other by such headers.
void expect_writable_name(const std::string& name);

struct SafetensorsHeader {
  struct Place {
    SafetensorsEntry entry;
    uint64_t begin = 0;      // in bytes from the beginning of the data
    std::string checksum{};  // empty if the file has none
  };
  std::vector<Place> places;  // in the order in which the tensors lie in the file, without gaps
  std::map<std::string, std::string> metadata;

  /// Throws IoError if the text is not a header, or if its tensors do not fill exactly `data_bytes`.
  static SafetensorsHeader parse(std::string_view text, uint64_t data_bytes);
};

/// The text of a header, and the place of the checksums in it: zeros, which are replaced when the tensors have been written. The first
/// checksum is that of the header itself with the zeros; the others are those of the tensors, in the order of `entries`.
struct SafetensorsHeaderText {
  std::string text;
  size_t checksums = 0;

  SafetensorsHeaderText(const std::vector<SafetensorsEntry>& entries, const std::map<std::string, std::string>& metadata);
};

}  // namespace tessera::checkpoint
