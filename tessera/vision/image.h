// Pictures: decoding the bytes of a JPEG, PNG or WebP file.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::vision {

struct Box {
  int64_t top = 0, left = 0, height = 0, width = 0;
};
struct ImageSize {
  int64_t height = 0, width = 0;
};
struct DecodeOptions {
  std::optional<Box> part = {};
  int64_t may_shrink_to = 0;
  bool exif_orientation = false;
};
ImageSize size_of_image(std::string_view bytes, const std::string& name);
at::Tensor decode_image(std::string_view bytes, const std::string& name, const DecodeOptions& options = {});
at::Tensor read_image(const std::filesystem::path& path, const DecodeOptions& options = {});

}  // namespace tessera::vision
