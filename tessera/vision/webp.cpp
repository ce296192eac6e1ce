// WebP by libwebp, where the library was built with it.
#include "tessera/base/error.h"
#include "tessera/vision/codecs.h"
#ifdef TESSERA_WEBP
#include <webp/decode.h>
#include "tessera/vision/picture.h"
#endif

namespace tessera::vision {

#ifdef TESSERA_WEBP
namespace {

const uint8_t* webp_data(std::string_view bytes) {
  return reinterpret_cast<const uint8_t*>(bytes.data());
}

}  // namespace

ImageSize size_of_webp(std::string_view bytes, const std::string& name) {
  WebPBitstreamFeatures features;
  const auto status = ::WebPGetFeatures(webp_data(bytes), bytes.size(), &features);
  if (status != VP8_STATUS_OK) {
    throw IoError("the WebP {} is damaged: {}", name,
                  status == VP8_STATUS_NOT_ENOUGH_DATA ? "it is truncated" : "its header makes no sense");
  }
  if (features.has_animation != 0)
    throw IoError("the WebP {} is an animation, and pictures alone are read; write one of its pictures", name);
  return checked_size(features.height, features.width, name);
}

at::Tensor decode_webp(std::string_view bytes, const std::string& name, const DecodeOptions& options) {
  const auto size = size_of_webp(bytes, name);
  const auto picture = empty_picture(size);
  const auto stride = 3 * size.width;
  if (::WebPDecodeRGBInto(webp_data(bytes), bytes.size(), picture.mutable_data_ptr<uint8_t>(), static_cast<size_t>(stride * size.height),
                          static_cast<int>(stride)) == nullptr) {
    throw IoError("the WebP {} is damaged, or truncated", name);
  }
  return cut(picture, options, name);
}
#else
ImageSize size_of_webp(std::string_view, const std::string& name) {
  throw ConfigError(
      "{} is a WebP, and Tessera was built without libwebp; install its headers (libwebp-dev) and build it again, or write the file as a "
      "PNG",
      name);
}

at::Tensor decode_webp(std::string_view bytes, const std::string& name, const DecodeOptions&) {
  size_of_webp(bytes, name);
  return {};
}
#endif

}  // namespace tessera::vision
