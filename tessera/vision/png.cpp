// PNG by libpng. A picture is always read to its end, so that libpng compares all checksums.
#include <ATen/ATen.h>
#include <png.h>

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/no_copy.h"
#include "tessera/vision/codecs.h"
#include "tessera/vision/picture.h"

namespace tessera::vision {
namespace {

/// Clamps 16-bit grey, which is 16-bit RGB here, to 255, as Pillow does.
void clip_to_8_bits(png_structp, png_row_infop row, png_bytep values) {
  const auto count = size_t{row->width} * 3;
  for (size_t i = 0; i < count; i++) values[i] = values[2 * i] == 0 ? values[2 * i + 1] : 255;
}

/// A PNG whose header has been read.
class PngReader : NoCopy {
 public:
  PngReader(std::string_view bytes, const std::string& name) : rest_(bytes), name_(name) {
    png_ = ::png_create_read_struct(
        PNG_LIBPNG_VER_STRING, &calls_,
        [](png_structp png, png_const_charp reason) { static_cast<LibraryCalls*>(::png_get_error_ptr(png))->fail(reason); },
        [](png_structp, png_const_charp) {});
    if (png_ != nullptr) info_ = ::png_create_info_struct(png_);
    if (info_ == nullptr) {
      ::png_destroy_read_struct(&png_, nullptr, nullptr);
      throw ConfigError("libpng can't be used: it is of another version than its header, or there is too little memory");
    }
    ::png_set_crc_action(png_, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT);  // libpng would only warn in chunks that are not critical
    ::png_set_read_fn(png_, &rest_, [](png_structp png, png_bytep to, size_t count) {
      auto& rest = *static_cast<std::string_view*>(::png_get_io_ptr(png));
      if (count > rest.size()) ::png_error(png, "it is truncated");
      std::memcpy(to, rest.data(), count);
      rest.remove_prefix(count);
    });
  }
  ~PngReader() { ::png_destroy_read_struct(&png_, &info_, nullptr); }

  at::Tensor read() {
    run([this] { ::png_read_info(png_, info_); });
    const auto size = checked_size(::png_get_image_height(png_, info_), ::png_get_image_width(png_, info_), name_);
    const auto picture = empty_picture(size);
    auto* const begin = picture.mutable_data_ptr<uint8_t>();
    const auto bytes_of_row = static_cast<size_t>(size.width) * 3;
    run([&] {
      const auto color = ::png_get_color_type(png_, info_);
      if (color == PNG_COLOR_TYPE_PALETTE) {
        ::png_set_palette_to_rgb(png_);
      } else if (color == PNG_COLOR_TYPE_GRAY || color == PNG_COLOR_TYPE_GRAY_ALPHA) {
        ::png_set_expand_gray_1_2_4_to_8(png_);
        ::png_set_gray_to_rgb(png_);
      }
      ::png_set_strip_alpha(png_);
      if (::png_get_bit_depth(png_, info_) == 16 && color == PNG_COLOR_TYPE_GRAY) {
        ::png_set_read_user_transform_fn(png_, clip_to_8_bits);
        ::png_set_user_transform_info(png_, nullptr, 8, 3);
      } else {
        ::png_set_strip_16(png_);
      }
      const int passes = ::png_set_interlace_handling(png_);
      ::png_read_update_info(png_, info_);
      if (::png_get_rowbytes(png_, info_) != bytes_of_row) ::png_error(png_, "it is of a kind that libpng does not convert to RGB");
      for (int pass = 0; pass < passes; pass++) {
        for (int64_t y = 0; y < size.height; y++) ::png_read_row(png_, begin + static_cast<size_t>(y) * bytes_of_row, nullptr);
      }
      ::png_read_end(png_, nullptr);
    });
    return picture;
  }

 private:
  template <class Calls>
  void run(const Calls& calls) {
    if (!calls_.run(calls)) throw IoError("the PNG {} is damaged: {}", name_, calls_.reason());
  }

  std::string_view rest_;
  const std::string& name_;
  LibraryCalls calls_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
};

}  // namespace

ImageSize size_of_png(std::string_view bytes, const std::string& name) {
  constexpr size_t kWidth = 16, kHeight = 20, kEnd = 24;  // after the signature, and the length and name of the first chunk
  if (bytes.size() < kEnd) throw IoError("the PNG {} is damaged: it is truncated", name);
  const auto number = [&](size_t at) {
    int64_t value = 0;
    for (size_t i = at; i < at + 4; i++) value = value << 8 | static_cast<uint8_t>(bytes[i]);
    return value;
  };
  return checked_size(number(kHeight), number(kWidth), name);
}

at::Tensor decode_png(std::string_view bytes, const std::string& name, const DecodeOptions& options) {
  return cut(PngReader(bytes, name).read(), options, name);
}

}  // namespace tessera::vision
