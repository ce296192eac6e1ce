#include "tessera/vision/image.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/vision/codecs.h"
#include "tessera/vision/transforms.h"

namespace tessera::vision {
namespace {

using namespace std::string_view_literals;

constexpr int64_t kMostPixels = int64_t{1} << 28;

struct Codec {
  bool (*is_of)(std::string_view bytes);
  ImageSize (*size)(std::string_view bytes, const std::string& name);
  at::Tensor (*decode)(std::string_view bytes, const std::string& name, const DecodeOptions& options);
};

constexpr std::array kCodecs = {
    Codec{[](std::string_view bytes) { return bytes.starts_with("\xff\xd8\xff"sv); }, size_of_jpeg, decode_jpeg},
    Codec{[](std::string_view bytes) { return bytes.starts_with("\x89PNG\r\n\x1a\n"sv); }, size_of_png, decode_png},
    Codec{[](std::string_view bytes) { return bytes.starts_with("RIFF"sv) && bytes.substr(0, 12).ends_with("WEBP"sv); }, size_of_webp,
          decode_webp},
};

/// Formats are recognized by the first bytes, because in common data sets names and contents do not always agree.
const Codec& codec_of(std::string_view bytes, const std::string& name) {
  const auto* const found = std::ranges::find_if(kCodecs, [&](const Codec& codec) { return codec.is_of(bytes); });
  if (found != kCodecs.end()) return *found;
  if (bytes.empty()) throw IoError("{} is empty, and no picture", name);
  const auto beginning = bytes.substr(0, 12);
  const bool is_text = std::ranges::all_of(beginning, [](char letter) { return letter == '\n' || (letter >= ' ' && letter <= '~'); });
  const auto shown = is_text ? fmt::format("'{}'", printable(beginning))
                             : fmt::format("the bytes {:02x}",
                                           fmt::join(std::span(reinterpret_cast<const uint8_t*>(beginning.data()), beginning.size()), " "));
  throw IoError("{} is not a JPEG, PNG or WebP: it begins with {}", name, shown);
}

/// Turns the picture by an orientation of Exif: from 5 on rows and columns are exchanged, and then some are mirrored.
at::Tensor turned(const at::Tensor& picture, int64_t orientation) {
  auto pixels = picture.permute({1, 2, 0});
  if (orientation >= 5) pixels = pixels.transpose(0, 1);
  std::vector<int64_t> mirrored;
  if (orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8) mirrored.push_back(0);
  if (orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7) mirrored.push_back(1);
  return pixels.flip(mirrored).contiguous().permute({2, 0, 1});
}

}  // namespace

ImageSize checked_size(int64_t height, int64_t width, const std::string& name) {
  if (height < 1 || width < 1) throw IoError("the picture {} is damaged: it says that it has {} by {} pixels", name, height, width);
  if (height > kMostPixels / width) {
    throw IoError("the picture {} has {} by {} pixels, and at most {} together are read; make it smaller", name, height, width,
                  kMostPixels);
  }
  return {.height = height, .width = width};
}

Box part_of(const DecodeOptions& options, ImageSize size, const std::string& name) {
  const auto part = options.part.value_or(Box{.height = size.height, .width = size.width});
  const auto is_within = [](int64_t from, int64_t count, int64_t all) {
    return from >= 0 && count >= 1 && from < all && count <= all - from;
  };
  if (!is_within(part.top, part.height, size.height) || !is_within(part.left, part.width, size.width)) {
    throw UsageError("a part of {} by {} pixels from row {} and column {} on is not within the picture {}, which has {} by {}", part.height,
                     part.width, part.top, part.left, name, size.height, size.width);
  }
  return part;
}

at::Tensor cut(const at::Tensor& whole, const DecodeOptions& options, const std::string& name) {
  const auto part = part_of(options, {.height = whole.size(1), .width = whole.size(2)}, name);
  return options.part ? crop(whole, part).clone() : whole;  // so that the rest of the picture is freed
}

ImageSize size_of_image(std::string_view bytes, const std::string& name) {
  return codec_of(bytes, name).size(bytes, name);
}

at::Tensor decode_image(std::string_view bytes, const std::string& name, const DecodeOptions& options) {
  auto picture = codec_of(bytes, name).decode(bytes, name, options);
  const auto orientation = options.exif_orientation ? orientation_of(bytes) : 1;
  return orientation == 1 ? picture : turned(picture, orientation);
}

at::Tensor read_image(const std::filesystem::path& file, const DecodeOptions& options) {
  return decode_image(InputFile(file).read_all(), file.string(), options);
}

}  // namespace tessera::vision
