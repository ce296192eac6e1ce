// The orientation in a picture's Exif, which is a small TIFF. Damaged Exif is ignored, as by other readers.
#include <algorithm>
#include <bit>

#include "tessera/vision/codecs.h"

namespace tessera::vision {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kExifMark("Exif\0\0", 6);

/// Returns the number in `count` bytes; 0 if there are fewer.
uint32_t number_at(std::string_view bytes, size_t place, size_t count, std::endian order) {
  if (place > bytes.size() || count > bytes.size() - place) return 0;
  uint32_t value = 0;
  for (size_t i = 0; i < count; i++)
    value = value << 8 | static_cast<uint8_t>(bytes[place + (order == std::endian::big ? i : count - 1 - i)]);
  return value;
}

/// Segments of a marker, a length that counts itself, and contents, up to the first scan.
std::string_view exif_of_jpeg(std::string_view bytes) {
  constexpr uint32_t kApp1 = 0xffe1, kScan = 0xffda;
  for (size_t place = 2; place < bytes.size();) {
    const auto marker = number_at(bytes, place, 2, std::endian::big);
    if (marker == 0xffff) {  // a byte may be filled in before a marker
      place++;
      continue;
    }
    const auto length = number_at(bytes, place + 2, 2, std::endian::big);
    if (marker < 0xff00 || marker == kScan || length < 2) break;
    const auto contents = bytes.substr(std::min(place + 4, bytes.size()), length - 2);
    if (marker == kApp1 && contents.starts_with(kExifMark)) return contents.substr(kExifMark.size());
    place += 2 + length;
  }
  return {};
}

/// Chunks of a length, a name, contents and a checksum.
std::string_view exif_of_png(std::string_view bytes) {
  for (size_t place = 8; place + 8 < bytes.size();) {
    const auto length = number_at(bytes, place, 4, std::endian::big);
    if (bytes.substr(place + 4, 4) == "eXIf"sv) return bytes.substr(place + 8, length);
    place += 12 + size_t{length};
  }
  return {};
}

/// Chunks of a name, a length, and contents of an even number of bytes.
std::string_view exif_of_webp(std::string_view bytes) {
  for (size_t place = 12; place + 8 < bytes.size();) {
    const auto length = number_at(bytes, place + 4, 4, std::endian::little);
    if (bytes.substr(place, 4) == "EXIF"sv) {
      const auto contents = bytes.substr(place + 8, length);
      return contents.starts_with(kExifMark) ? contents.substr(kExifMark.size()) : contents;
    }
    place += 8 + size_t{length} + length % 2;
  }
  return {};
}

}  // namespace

int64_t orientation_of(std::string_view bytes) {
  constexpr size_t kEntry = 12;
  constexpr uint32_t kOrientation = 0x0112, kShort = 3;
  const auto tiff = bytes.starts_with("\xff\xd8"sv) ? exif_of_jpeg(bytes)
                    : bytes.starts_with("RIFF"sv)   ? exif_of_webp(bytes)
                                                    : exif_of_png(bytes);
  if (!tiff.starts_with("II*\0"sv) && !tiff.starts_with("MM\0*"sv)) return 1;
  const auto order = tiff.starts_with("I") ? std::endian::little : std::endian::big;
  const size_t folder = number_at(tiff, 4, 4, order);
  const auto entries = number_at(tiff, folder, 2, order);
  for (size_t i = 0; i < entries; i++) {
    const auto entry = folder + 2 + i * kEntry;
    if (number_at(tiff, entry, 2, order) != kOrientation || number_at(tiff, entry + 2, 2, order) != kShort) continue;
    const auto value = number_at(tiff, entry + 8, 2, order);
    return value >= 2 && value <= 8 ? value : 1;
  }
  return 1;
}

}  // namespace tessera::vision
