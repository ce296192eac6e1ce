// Checksum: the 64-bit XXH3 of bytes such as a tensor's, which is computed as fast as memory can be read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

class Checksum {
 public:
  Checksum();
  Checksum(Checksum&&) noexcept;
  ~Checksum();

  void add(std::span<const std::byte> bytes);
  uint64_t value() const;

  /// Checksums in files are texts of 16 hexadecimal digits.
  static constexpr size_t kDigits = 16;
  static std::string text(uint64_t value);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t checksum_value(std::string_view bytes);
/// Returns checksum_value() as a text.
std::string checksum_of(std::string_view bytes);
/// Returns the checksum of a text in which zeros replace `checksums`, a substring that begins with the text's own checksum. Returns nothing
/// if the text does not contain `checksums`.
std::optional<std::string> checksum_around(std::string_view text, std::string_view checksums);
/// Returns the checksum of part number `part` from a list in which the checksum of the whole text comes first.
inline std::string checksum_at(const std::string& checksums, size_t part) {
  return checksums.substr(Checksum::kDigits * (part + 1), Checksum::kDigits);
}

}  // namespace tessera::checkpoint
