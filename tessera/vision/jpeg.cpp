// JPEG by libjpeg-turbo. Its settings are left at their defaults, as in Pillow, so both have the same pixels.
#include <ATen/ATen.h>
#include <stdio.h>  // jpeglib.h needs it
// clang-format off
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

#include <algorithm>
#include <cstring>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/no_copy.h"
#include "tessera/vision/codecs.h"
#include "tessera/vision/picture.h"

namespace tessera::vision {
namespace {

constexpr int64_t kSmallest = 8;  // a JPEG may be shrunk to an eighth
// Columns around a part that are also decoded, because the outermost decoded columns have no neighbours in smooth upsampling.
constexpr int64_t kNeighbours = 8;
// The most scans of a progressive JPEG, of which programs write ten: each takes time for all pixels, but can be a few bytes.
constexpr int kMostScans = 500;

LibraryCalls& calls_of(j_common_ptr state) {
  return *static_cast<LibraryCalls*>(state->client_data);
}

/// A JPEG whose header has been read.
class JpegReader : NoCopy {
 public:
  JpegReader(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {
    state_.err = ::jpeg_std_error(&errors_);
    state_.client_data = &calls_;  // libjpeg leaves it as it is
    errors_.error_exit = [](j_common_ptr state) {
      char reason[JMSG_LENGTH_MAX];
      state->err->format_message(state, reason);
      calls_of(state).fail(reason);
    };
    errors_.emit_message = [](j_common_ptr, int) {};  // warnings are ignored, as in Pillow
    progress_.progress_monitor = [](j_common_ptr state) {
      if (reinterpret_cast<j_decompress_ptr>(state)->input_scan_number > kMostScans) calls_of(state).fail("it has too many scans");
    };
    try {
      if (!calls_.run([this] { ::jpeg_create_decompress(&state_); })) throw ConfigError("libjpeg can't be used: {}", calls_.reason());
      run([this] {
        state_.progress = &progress_;
        ::jpeg_mem_src(&state_, reinterpret_cast<const unsigned char*>(bytes_.data()), bytes_.size());
        // libjpeg's own function would make up an end.
        state_.src->fill_input_buffer = [](j_decompress_ptr state) -> boolean {
          calls_of(reinterpret_cast<j_common_ptr>(state)).fail("it is truncated");
        };
        ::jpeg_read_header(&state_, TRUE);
      });
      size_ = checked_size(state_.image_height, state_.image_width, name_);
    } catch (...) {
      ::jpeg_destroy_decompress(&state_);
      throw;
    }
  }
  ~JpegReader() { ::jpeg_destroy_decompress(&state_); }

  ImageSize size() const { return size_; }

  /// A part of the picture at 1/`shrink` of its size.
  at::Tensor read(const Box& part, int64_t shrink) {
    throw_if_truncated();
    const Box box = {.top = part.top / shrink,
                     .left = part.left / shrink,
                     .height = (part.top + part.height + shrink - 1) / shrink - part.top / shrink,
                     .width = (part.left + part.width + shrink - 1) / shrink - part.left / shrink};
    const auto picture = empty_picture({.height = box.height, .width = box.width});
    const bool has_four_inks = state_.num_components == 4;
    std::vector<uint8_t> buffer(static_cast<size_t>(size_.width) * (has_four_inks ? 4 : 3));
    auto* const row = buffer.data();
    auto* to = picture.mutable_data_ptr<uint8_t>();
    run([&] {
      state_.scale_num = 1;
      state_.scale_denom = static_cast<unsigned>(shrink);
      state_.out_color_space = has_four_inks ? JCS_CMYK : JCS_RGB;
      ::jpeg_start_decompress(&state_);
      auto left = static_cast<JDIMENSION>(std::max<int64_t>(box.left - kNeighbours, 0));
      auto width = static_cast<JDIMENSION>(std::min<int64_t>(box.left + box.width + kNeighbours, state_.output_width)) - left;
      if (width < state_.output_width) ::jpeg_crop_scanline(&state_, &left, &width);  // moves `left` further to the left
      ::jpeg_skip_scanlines(&state_, static_cast<JDIMENSION>(box.top));
      const auto before = static_cast<size_t>(box.left) - left;
      for (int64_t y = 0; y < box.height; y++, to += 3 * box.width) {
        auto* rows_to_read = row;
        ::jpeg_read_scanlines(&state_, &rows_to_read, 1);
        if (has_four_inks) {
          to_rgb(row + 4 * before, to, box.width);
        } else {
          std::memcpy(to, row + 3 * before, static_cast<size_t>(3 * box.width));
        }
      }
    });
    return picture;
  }

 private:
  template <class Calls>
  void run(const Calls& calls) {
    if (calls_.run(calls)) return;
    if (errors_.msg_code == JERR_OUT_OF_MEMORY) throw Error("libjpeg can't read {}: there is too little memory", name_);
    throw IoError("the JPEG {} is damaged: {}", name_, calls_.reason());
  }

  /// Looks for the end marker, because a part that ends before the truncation could be decoded, and the part must not decide whether a file
  /// is damaged. Between the header and the end nothing else looks like the end marker.
  void throw_if_truncated() const {
    const auto begin = bytes_.size() - state_.src->bytes_in_buffer;
    const auto end = bytes_.rfind("\xff\xd9");
    if (end == std::string_view::npos || end < begin) throw IoError("the JPEG {} is damaged: it is truncated", name_);
  }

  /// Converts CMYK as Pillow does, which takes each such JPEG for one of Adobe's, with inverted inks.
  static void to_rgb(const uint8_t* inks, uint8_t* to, int64_t count) {
    for (int64_t i = 0; i < count; i++, inks += 4, to += 3) {
      for (int channel = 0; channel < 3; channel++) {
        const int product = (255 - inks[channel]) * inks[3] + 128;
        to[channel] = static_cast<uint8_t>(inks[3] - (((product >> 8) + product) >> 8));
      }
    }
  }

  std::string_view bytes_;
  const std::string& name_;
  LibraryCalls calls_;
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  jpeg_decompress_struct state_{};
  ImageSize size_;
};

}  // namespace

ImageSize size_of_jpeg(std::string_view bytes, const std::string& name) {
  return JpegReader(bytes, name).size();
}

at::Tensor decode_jpeg(std::string_view bytes, const std::string& name, const DecodeOptions& options) {
  JpegReader reader(bytes, name);
  const auto part = part_of(options, reader.size(), name);
  int64_t shrink = 1;
  while (options.may_shrink_to > 0 && shrink < kSmallest && std::min(part.height, part.width) / (2 * shrink) >= options.may_shrink_to)
    shrink *= 2;
  return reader.read(part, shrink);
}

}  // namespace tessera::vision
