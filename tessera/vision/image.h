// Pictures out of the bytes of a JPEG, PNG or WebP file, with the pixels that Pillow reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::vision {

// A picture is a tensor of bytes {3, height, width}, RGB, whose channels lie together in memory: {height, width, 3}.

struct Box {
  int64_t top = 0, left = 0, height = 0, width = 0;
};

struct ImageSize {
  int64_t height = 0, width = 0;
};

struct DecodeOptions {
  /// Only this part of the picture is decoded, in pixels of the picture as it is stored; unset: all of it.
  std::optional<Box> part = {};
  /// A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, which is faster, if the part then still has this many pixels along both sides.
  /// Its borders are rounded outwards. 0: never.
  int64_t may_shrink_to = 0;
  /// Whether the picture, or its part, is turned by the orientation in its Exif, which torchvision's ImageFolder ignores.
  bool exif_orientation = false;
};

/// Returns the size of a picture as it is stored, from the beginning of its file. `name` is for errors. Throws IoError for bytes that are
/// not a picture, and for a picture of more than 2^28 pixels.
ImageSize size_of_image(std::string_view bytes, const std::string& name);

/// Returns the picture as Pillow's `Image.open(...).convert("RGB")` does, for every kind of JPEG, PNG and WebP: alpha is dropped. Throws
/// IoError, with the name, for a file that is truncated or damaged, and for some that Pillow accepts: a PNG whose end is missing or whose
/// checksums are wrong, a JPEG that has other bytes in place of its end, an animated WebP. Throws UsageError for a part that is not within
/// the picture, and ConfigError for a WebP in a build without libwebp.
at::Tensor decode_image(std::string_view bytes, const std::string& name, const DecodeOptions& options = {});
at::Tensor read_image(const std::filesystem::path& file, const DecodeOptions& options = {});

}  // namespace tessera::vision
