// The checksum of a tensor's bytes: XXH3 with 64 bits, which is as fast as memory.
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
/// The checksum as a text.
std::string checksum_of(std::string_view bytes);
/// Returns the checksum of a text with zeros in place of `checksums`, a part of it that begins with this one. Nothing if it lacks them.
std::optional<std::string> checksum_around(std::string_view text, std::string_view checksums);
/// The checksum of a part.
inline std::string checksum_at(const std::string& checksums, size_t part) {
  return checksums.substr(Checksum::kDigits * (part + 1), Checksum::kDigits);
}

}  // namespace tessera::checkpoint
