// The header of a safetensors file: where each tensor is, and metadata.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::checkpoint {

/// The size of the number in front of the header that says how long the header is.
inline constexpr uint64_t kLengthBytes = 8;

/// A tensor in a file. Its dtype is one of those in dtype_names.cpp.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;

  int64_t bytes() const;
};

/// Throws UsageError for a name that a tensor in a safetensors file can't have. Saves in other formats check names, too, because live_run()
/// sends such headers between ranks.
void expect_writable_name(const std::string& name);

struct SafetensorsHeader {
  struct Place {
    SafetensorsEntry entry;
    uint64_t begin = 0;      // in bytes from the beginning of the data
    std::string checksum{};  // empty if the file has no checksums
  };
  std::vector<Place> places;  // in the order in which the tensors lie in the file, without gaps
  std::map<std::string, std::string> metadata;

  /// Throws IoError if the text is not a header, or if its tensors do not fill exactly `data_bytes`.
  static SafetensorsHeader parse(std::string_view text, uint64_t data_bytes);
};

/// The text of a header, and where its checksums are. The checksums are zeros until the writer has written the tensors. Then it replaces
/// the first by the checksum of the header with the zeros, and the others by the checksums of the tensors, in the order of `entries`.
struct SafetensorsHeaderText {
  std::string text;
  size_t checksums = 0;

  SafetensorsHeaderText(const std::vector<SafetensorsEntry>& entries, const std::map<std::string, std::string>& metadata);
};

}  // namespace tessera::checkpoint
