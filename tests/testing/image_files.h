// Pictures as files for tests: PNGs and tar archives made without the libraries that are tested.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <zlib.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::testing {

/// Bytes {3, height, width}, other ones for each number below 256.
inline at::Tensor picture(int64_t number, int64_t height = 12, int64_t width = 10) {
  return (at::arange(3 * height * width) * 37 + number * 11).remainder(256).to(at::kByte).view({3, height, width});
}

inline std::string big_endian(size_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
  return bytes;
}

inline std::string png_of(const at::Tensor& image) {
  const auto chunk = [](const std::string& kind, const std::string& data) {
    const auto both = kind + data;
    return big_endian(data.size()) + both +
           big_endian(::crc32(0, reinterpret_cast<const Bytef*>(both.data()), static_cast<uInt>(both.size())));
  };
  const auto rows = at::constant_pad_nd(image.permute({1, 2, 0}).flatten(1), {1, 0}).contiguous();  // each begins with its filter: 0, none
  auto length = ::compressBound(static_cast<uLong>(rows.nbytes()));
  std::string packed(length, '\0');
  ::compress(reinterpret_cast<Bytef*>(packed.data()), &length, rows.const_data_ptr<uint8_t>(), static_cast<uLong>(rows.nbytes()));
  packed.resize(length);
  const auto size = big_endian(static_cast<size_t>(image.size(2))) + big_endian(static_cast<size_t>(image.size(1)));
  constexpr std::string_view kEightBitsOfRgb("\x08\x02\0\0\0", 5);
  return "\x89PNG\r\n\x1a\n" + chunk("IHDR", size + std::string(kEightBitsOfRgb)) + chunk("IDAT", packed) + chunk("IEND", "");
}

/// A header of a tar archive with the right check sum. `size` is the field as it stands there.
inline std::string tar_header(const std::string& name, std::string size, char type = '0', const std::string& magic = "ustar") {
  std::string header = name;
  header.resize(100);
  header += "0000644";
  header.resize(124);
  size.resize(12);
  header += size;
  header.resize(148);
  header += "        ";
  header += type;
  header.resize(257);
  header += magic;
  header.resize(512);
  unsigned sum = 0;
  for (const char byte : header) sum += static_cast<uint8_t>(byte);
  return header.replace(148, 7, fmt::format("{:06o}", sum) + '\0');
}

inline std::string tar_member(const std::string& name, const std::string& bytes, char type = '0') {
  auto member = tar_header(name, fmt::format("{:011o}", bytes.size()), type) + bytes;
  member.resize((member.size() + 511) / 512 * 512);
  return member;
}

inline std::string tar_of(const std::vector<std::pair<std::string, std::string>>& files) {
  std::string archive;
  for (const auto& [name, bytes] : files) archive += tar_member(name, bytes);
  return archive + std::string(1024, '\0');
}

}  // namespace tessera::testing
