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
#include "tessera/base/numel.h"

namespace tessera::data {
namespace {

constexpr size_t kMagic = 4;      // two zeros, the type, the number of dimensions
constexpr char kBytes = 0x08;     // the only type that the well-known data sets use
constexpr size_t kDimension = 4;  // bytes of a size, big-endian
constexpr size_t kMostDimensions = 16;
constexpr size_t kBlock = 1 << 20;

/// Reads a file, and decompresses it if it is compressed by gzip: zlib returns the bytes of other files unchanged.
class Unpacked {
 public:
  explicit Unpacked(const std::filesystem::path& file) : file_(file), opened_((errno = 0, ::gzopen(file.c_str(), "rb")), &::gzclose) {
    if (!opened_) throw IoError("can't open {}: {}", file, errno == 0 ? "no memory" : why_not_opened(file, errno));
  }

  /// Appends up to `count` bytes; fewer only at the end of the file. Reads in blocks, so that the wrong size in a damaged header allocates
  /// no more memory than the file has bytes.
  void read(std::string& to, size_t count) {
    while (count > 0) {
      const auto before = to.size();
      const auto block = std::min(count, kBlock);
      to.resize(before + block);
      const int got = ::gzread(opened_.get(), to.data() + before, static_cast<unsigned>(block));
      to.resize(before + static_cast<size_t>(std::max(got, 0)));
      read_ += static_cast<size_t>(std::max(got, 0));
      // gzread() may return fewer bytes without an error at the end of a truncated file; gzerror() reports it.
      int code = Z_OK;
      const std::string reason = ::gzerror(opened_.get(), &code);
      if (got < 0 || code != Z_OK) {
        throw IoError("{} can't be read beyond byte {} of its contents: {}", file_, read_, code == Z_ERRNO ? std::strerror(errno) : reason);
      }
      if (got == 0) return;
      count -= static_cast<size_t>(got);
    }
  }

 private:
  std::filesystem::path file_;
  std::unique_ptr<gzFile_s, decltype(&::gzclose)> opened_;
  size_t read_ = 0;
};

std::vector<int64_t> sizes_in(const std::string& header, size_t dimensions) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < dimensions; i++) {
    int64_t size = 0;
    for (size_t byte = 0; byte < kDimension; byte++) size = size << 8 | static_cast<uint8_t>(header[kMagic + i * kDimension + byte]);
    sizes.push_back(size);
  }
  return sizes;
}

/// Returns the path of the first of the usual names that is in the folder.
std::filesystem::path find(const std::filesystem::path& folder, const std::string& part, int dimensions) {
  std::vector<std::string> names;
  for (const auto* separator : {"-", "."}) {
    for (const auto* ending : {"", ".gz"}) names.push_back(fmt::format("{}{}idx{}-ubyte{}", part, separator, dimensions, ending));
  }
  const auto there = names_in(folder);
  for (const auto& name : names) {
    if (there && std::ranges::binary_search(*there, name)) return folder / name;
  }
  throw IoError("the folder {} {}; looked for {}", folder, there ? fmt::format("has no {}", part) : "does not exist", joined(names));
}

at::Tensor read_part(const std::filesystem::path& file, int64_t dimensions) {
  auto tensor = read_idx(file);
  if (tensor.dim() != dimensions) {
    throw IoError("{} has {} dimensions ({}) instead of {}", file, tensor.dim(), joined(tensor.sizes(), " x "), dimensions);
  }
  return tensor;
}

}  // namespace

at::Tensor read_idx(const std::filesystem::path& file) {
  Unpacked unpacked(file);
  std::string header;
  unpacked.read(header, kMagic);
  const auto dimensions = header.size() < kMagic ? 0 : static_cast<size_t>(static_cast<uint8_t>(header[3]));
  if (dimensions == 0 || header[0] != 0 || header[1] != 0 || header[2] != kBytes) {
    throw IoError("{} is not an IDX file of bytes: it begins with [{}] instead of [00, 00, 08, number of dimensions]", file,
                  fmt::format("{:02x}", fmt::join(std::span(reinterpret_cast<const uint8_t*>(header.data()), header.size()), ", ")));
  }
  if (dimensions > kMostDimensions) {
    throw IoError("{} is not an IDX file of a data set: it has {} dimensions, but at most {} are supported", file, dimensions,
                  kMostDimensions);
  }
  const auto length = kMagic + dimensions * kDimension;
  unpacked.read(header, length - kMagic);
  if (header.size() < length) {
    throw IoError("{} ends within its header, after {} of {} bytes", file, header.size(), length);
  }
  const auto sizes = sizes_in(header, dimensions);
  const auto promised = checked_numel(sizes);
  if (!promised) throw IoError("{} promises {} bytes, which no tensor can hold", file, joined(sizes, " x "));
  const auto data = std::make_shared<std::string>();
  unpacked.read(*data, static_cast<size_t>(*promised) + 1);  // one byte more, to notice a file that is too long
  if (static_cast<int64_t>(data->size()) != *promised) {
    throw IoError("{} promises {} = {} bytes, but has {}", file, joined(sizes, " x "), *promised,
                  static_cast<int64_t>(data->size()) < *promised ? std::to_string(data->size()) : "more");
  }
  // The tensor owns the contents, so nothing is copied.
  return at::from_blob(data->data(), sizes, [data](void*) {}, at::kByte);
}

Samples read_idx_folder(const std::filesystem::path& folder, Split split) {
  const std::string name = split == Split::Train ? "train" : "t10k";
  const auto image_file = find(folder, name + "-images", 3);
  const auto label_file = find(folder, name + "-labels", 1);
  Samples samples{.inputs = read_part(image_file, 3), .targets = read_part(label_file, 1)};
  if (samples.inputs.size(0) != samples.targets.size(0)) {
    throw IoError("{} has {} images, but {} has {} labels", image_file, samples.inputs.size(0), label_file, samples.targets.size(0));
  }
  return samples;
}

}  // namespace tessera::data
