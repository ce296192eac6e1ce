// The formats of pictures, for image.cpp: what each knows of its files, and what they share.
#pragma once

#include <setjmp.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "tessera/vision/image.h"

namespace tessera::vision {

/// Each throws IoError for what is damaged, and other errors for what the library can't do. The sizes are checked.
ImageSize size_of_jpeg(std::string_view bytes, const std::string& name);
ImageSize size_of_png(std::string_view bytes, const std::string& name);
ImageSize size_of_webp(std::string_view bytes, const std::string& name);
at::Tensor decode_jpeg(std::string_view bytes, const std::string& name, const DecodeOptions& options);
at::Tensor decode_png(std::string_view bytes, const std::string& name, const DecodeOptions& options);
at::Tensor decode_webp(std::string_view bytes, const std::string& name, const DecodeOptions& options);

/// What the Exif of a JPEG, PNG or WebP says: 2 to 8, as Exif numbers orientations, or 1 where it says nothing.
int64_t orientation_of(std::string_view bytes);

/// Throws IoError for a size that no picture has.
ImageSize checked_size(int64_t height, int64_t width, const std::string& name);
/// The part that the options ask for. Throws UsageError if it is not within the picture.
Box part_of(const DecodeOptions& options, ImageSize size, const std::string& name);
/// The part that the options ask for of a picture that was decoded as a whole.
at::Tensor cut(const at::Tensor& whole, const DecodeOptions& options, const std::string& name);

/// Calls functions of a C library that tells of an error by a call back, which must not return. That calls fail(), which leaves the library
/// by longjmp: so neither `calls` nor a call back may have an object with a destructor while the library runs.
class LibraryCalls {
 public:
  /// Whether the calls have come to their end; if not, reason() says why.
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
