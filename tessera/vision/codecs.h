// Decoders of JPEG, PNG and WebP for image.cpp, and the functions that they share.
#pragma once

#include <setjmp.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "tessera/vision/image.h"

namespace tessera::vision {

/// Each throws IoError for a damaged picture, and other errors if the library fails. Sizes are checked.
ImageSize size_of_jpeg(std::string_view bytes, const std::string& name);
ImageSize size_of_png(std::string_view bytes, const std::string& name);
ImageSize size_of_webp(std::string_view bytes, const std::string& name);
at::Tensor decode_jpeg(std::string_view bytes, const std::string& name, const DecodeOptions& options);
at::Tensor decode_png(std::string_view bytes, const std::string& name, const DecodeOptions& options);
at::Tensor decode_webp(std::string_view bytes, const std::string& name, const DecodeOptions& options);

/// Returns the orientation in the Exif of a JPEG, PNG or WebP: 2 to 8, as Exif numbers them, or 1 if it has none.
int64_t orientation_of(std::string_view bytes);

/// Throws IoError for a size that no picture has.
ImageSize checked_size(int64_t height, int64_t width, const std::string& name);
/// Returns the part that the options ask for. Throws UsageError if it is not within the picture.
Box part_of(const DecodeOptions& options, ImageSize size, const std::string& name);
/// Returns that part of a picture that was decoded as a whole.
at::Tensor cut(const at::Tensor& whole, const DecodeOptions& options, const std::string& name);

/// Calls functions of a C library that reports errors to a callback, which must not return. The callback calls fail(), which leaves the
/// library by longjmp, so neither `calls` nor the callback may hold an object with a destructor while the library runs.
class LibraryCalls {
 public:
  /// Returns whether all calls were made; if not, reason() says why.
  template <class Calls>
  bool run(const Calls& calls) {
    if (setjmp(back_) != 0) return false;
    calls();
    return true;
  }

  [[noreturn]] void fail(const char* reason) {
    std::snprintf(reason_, sizeof(reason_), "%s", reason);
    longjmp(back_, 1);
  }

  const char* reason() const { return reason_; }

 private:
  jmp_buf back_;
  char reason_[256] = {};
};

}  // namespace tessera::vision
