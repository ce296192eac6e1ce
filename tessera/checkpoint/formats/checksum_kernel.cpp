// Computes XXH3, compiled with the flags of kernels.
#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

#include "tessera/checkpoint/formats/checksum.h"

namespace tessera::checkpoint {

struct Checksum::State {
  XXH3_state_t hash;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->hash);
}

Checksum::Checksum(Checksum&&) noexcept = default;
Checksum::~Checksum() = default;

void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->hash, bytes.data(), bytes.size());
}

uint64_t Checksum::value() const {
  return XXH3_64bits_digest(&state_->hash);
}

std::string Checksum::text(uint64_t value) {
  return fmt::format("{:016x}", value);
}

uint64_t checksum_value(std::string_view bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string checksum_of(std::string_view bytes) {
  return Checksum::text(checksum_value(bytes));
}

std::optional<std::string> checksum_around(std::string_view text, std::string_view checksums) {
  const auto place = text.find(checksums);
  if (place == std::string_view::npos) return std::nullopt;
  std::string blank(text);
  std::fill_n(blank.begin() + static_cast<std::ptrdiff_t>(place), checksums.size(), '0');
  return checksum_of(blank);
}

}  // namespace tessera::checkpoint
