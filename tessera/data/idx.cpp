#include "tessera/data/idx.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"

namespace tessera::data {
namespace {

constexpr size_t kMagic = 4;      // two zeros, the type, the number of dimensions
constexpr char kBytes = 0x08;     // the only type that the well-known data sets use
constexpr size_t kDimension = 4;  // bytes of a size, big-endian
constexpr size_t kMostDimensions = 16;
constexpr size_t kBlock = 1 << 20;

/// The contents of the file, decompressed. zlib reads a file that is not compressed unchanged.
std::string contents(const std::filesystem::path& file) {
  errno = 0;
  const std::unique_ptr<gzFile_s, decltype(&::gzclose)> opened(::gzopen(file.c_str(), "rb"), &::gzclose);
  if (!opened) throw IoError(fmt::format("can't open {}: {}", file.string(), errno == 0 ? "no memory" : std::strerror(errno)));
  std::string result;
  for (;;) {
    const auto before = result.size();
    result.resize(before + kBlock);
    const int count = ::gzread(opened.get(), result.data() + before, kBlock);
    result.resize(before + static_cast<size_t>(std::max(count, 0)));
    // gzread() may return fewer bytes without an error at the end of a truncated file; gzerror() reports it.
    int code = Z_OK;
    const std::string reason = ::gzerror(opened.get(), &code);
    if (count < 0 || code != Z_OK) {
      throw IoError(fmt::format("{} can't be read beyond byte {} of its contents: {}", file.string(), result.size(),
                                code == Z_ERRNO ? std::strerror(errno) : reason));
    }
    if (count == 0) return result;
  }
}

std::vector<int64_t> sizes_in(const std::string& header, size_t dimensions) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < dimensions; i++) {
    int64_t size = 0;
    for (size_t byte = 0; byte < kDimension; byte++) size = size << 8 | static_cast<uint8_t>(header[kMagic + i * kDimension + byte]);
    sizes.push_back(size);
  }
  return sizes;
}

/// The path of the file, under whichever of the usual names exists.
std::filesystem::path find(const std::filesystem::path& folder, const std::string& part, int dimensions) {
  std::vector<std::string> names;
  for (const auto* separator : {"-", "."}) {
    for (const auto* ending : {"", ".gz"}) names.push_back(fmt::format("{}{}idx{}-ubyte{}", part, separator, dimensions, ending));
  }
  const auto there = names_in(folder);
  for (const auto& name : names) {
    if (there && std::ranges::binary_search(*there, name)) return folder / name;
  }
  throw IoError(fmt::format("the folder {} {}; looked for {}", folder.string(), there ? fmt::format("has no {}", part) : "does not exist",
                            fmt::join(names, ", ")));
}

at::Tensor read_part(const std::filesystem::path& file, int64_t dimensions) {
  auto tensor = read_idx(file);
  if (tensor.dim() != dimensions) {
    throw IoError(
        fmt::format("{} has {} dimensions ({}) instead of {}", file.string(), tensor.dim(), fmt::join(tensor.sizes(), " x "), dimensions));
  }
  return tensor;
}

}  // namespace

at::Tensor read_idx(const std::filesystem::path& file) {
  const auto data = std::make_shared<std::string>(contents(file));
  const auto dimensions = data->size() < kMagic ? 0 : static_cast<size_t>(static_cast<uint8_t>((*data)[3]));
  if (dimensions == 0 || (*data)[0] != 0 || (*data)[1] != 0 || (*data)[2] != kBytes) {
    const auto start = data->substr(0, kMagic);
    throw IoError(fmt::format("{} is no IDX file of bytes: it begins with [{:02x}] instead of [00, 00, 08, number of dimensions]",
                              file.string(), fmt::join(std::span(reinterpret_cast<const uint8_t*>(start.data()), start.size()), ", ")));
  }
  if (dimensions > kMostDimensions) {
    throw IoError(fmt::format("{} is no IDX file of a data set: it has {} dimensions, and at most {} are read", file.string(), dimensions,
                              kMostDimensions));
  }
  const auto header = kMagic + dimensions * kDimension;
  if (data->size() < header)
    throw IoError(fmt::format("{} ends within its header, after {} of {} bytes", file.string(), data->size(), header));
  const auto sizes = sizes_in(*data, dimensions);
  const auto present = static_cast<int64_t>(data->size() - header);
  int64_t promised = 1;
  bool empty = false;
  for (const auto size : sizes) {
    empty |= size == 0;  // which must not hide that the other sizes are too large for a tensor
    if (promised >= 0 && __builtin_mul_overflow(promised, std::max<int64_t>(size, 1), &promised)) promised = -1;
  }
  if (empty && promised > 0) promised = 0;
  if (promised != present) {
    throw IoError(fmt::format("{} promises {}{} bytes, but has {}", file.string(), fmt::join(sizes, " x "),
                              promised < 0 ? "" : fmt::format(" = {}", promised), present));
  }
  // The tensor owns the contents, so nothing is copied.
  return at::from_blob(data->data() + header, sizes, [data](void*) {}, at::kByte);
}

Samples read_idx_folder(const std::filesystem::path& folder, Split split) {
  const std::string name = split == Split::Train ? "train" : "t10k";
  const auto image_file = find(folder, name + "-images", 3);
  const auto label_file = find(folder, name + "-labels", 1);
  Samples samples{.inputs = read_part(image_file, 3), .targets = read_part(label_file, 1)};
  if (samples.inputs.size(0) != samples.targets.size(0)) {
    throw IoError(fmt::format("{} has {} images, but {} has {} labels", image_file.string(), samples.inputs.size(0), label_file.string(),
                              samples.targets.size(0)));
  }
  return samples;
}

}  // namespace tessera::data
