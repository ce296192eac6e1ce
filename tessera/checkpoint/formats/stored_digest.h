// StoredDigest: the checksum of bytes in a file, in either of the two forms in which files store checksums as text.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>

#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/formats/torch/zip.h"

namespace tessera::checkpoint {

/// XXH3, with 16 hexadecimal digits, or the CRC-32 of zip archives, with 8.
enum class DigestKind { Xxh3, Crc32 };

class StoredDigest {
 public:
  explicit StoredDigest(DigestKind kind) : kind_(kind) {}

  void add(std::span<const std::byte> bytes) {
    if (kind_ == DigestKind::Crc32) {
      crc_ = crc32_of(bytes, crc_);
    } else {
      checksum_.add(bytes);
    }
  }
  std::string text() const { return kind_ == DigestKind::Crc32 ? fmt::format("{:08x}", crc_) : Checksum::text(checksum_.value()); }
  static DigestKind kind_of(const std::string& text) { return text.size() == Checksum::kDigits ? DigestKind::Xxh3 : DigestKind::Crc32; }

 private:
  DigestKind kind_;
  Checksum checksum_;
  uint32_t crc_ = 0;
};

}  // namespace tessera::checkpoint
