#include "tessera/checkpoint/stored/catalog.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

constexpr uint64_t kBlock = 1 << 20;          // bytes that are read at once
constexpr int64_t kSparse = 8;                // a span of so many times the values in it is read in parts,
constexpr uint64_t kSmallestRead = 4096;      // unless these have fewer bytes
constexpr uint64_t kMostRepeats = 1024;       // of a value in a view, as expand() makes it,
constexpr uint64_t kMostUnchecked = 1 << 26;  // unless there are fewer values

/// Values in a file: those at `offset` (in bytes) + i * strides (in values).
struct Region {
  uint64_t offset = 0;
  std::vector<int64_t> sizes, strides;

  int64_t numel() const { return c10::multiply_integers(sizes); }
  /// From the first value to the last.
  int64_t span() const {
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); d++) last += (sizes[d] - 1) * strides[d];
    return last + 1;
  }
  /// The dimension with more than one value whose steps are the largest, if any.
  std::optional<size_t> outermost() const {
    std::optional<size_t> result;
    for (size_t d = 0; d < sizes.size(); d++) {
      if (sizes[d] > 1 && strides[d] > 0 && (!result || strides[d] > strides[*result])) result = d;
    }
    return result;
  }
};

/// Copies a region to a tensor of its sizes.
class RegionReader {
 public:
  RegionReader(const InputFile& file, at::ScalarType dtype) : file_(file), dtype_(dtype), width_(c10::elementSize(dtype)) {}

  void read(const Region& region, const at::Tensor& to) {
    const auto bytes = static_cast<uint64_t>(region.span()) * width_;
    const bool fits_as_it_is = to.is_cpu() && to.scalar_type() == dtype_ && to.strides() == at::IntArrayRef(region.strides) &&
                               to.is_non_overlapping_and_dense() && region.span() == region.numel();
    if (fits_as_it_is) return file_.read(to.mutable_data_ptr(), bytes, region.offset);
    const auto outer = region.outermost();
    if (outer && (bytes > kBlock || reads_too_much(region, *outer))) return split(region, *outer, to);
    if (!block_.defined() || block_.numel() < region.span()) block_ = at::empty({region.span()}, at::TensorOptions(at::kCPU).dtype(dtype_));
    file_.read(block_.mutable_data_ptr(), bytes, region.offset);
    to.copy_(block_.as_strided(region.sizes, region.strides));
  }

 private:
  bool reads_too_much(const Region& region, size_t outer) const {
    const auto row = static_cast<uint64_t>(region.numel() / region.sizes[outer]) * width_;
    return region.span() / region.numel() >= kSparse && row >= kSmallestRead;
  }

  void split(const Region& region, size_t dim, const at::Tensor& to) {
    const auto half = region.sizes[dim] / 2;
    const auto read_part = [&](int64_t begin, int64_t count) {
      auto part = region;
      part.offset += static_cast<uint64_t>(begin * region.strides[dim]) * width_;
      part.sizes[dim] = count;
      read(part, to.narrow(static_cast<int64_t>(dim), begin, count));
    };
    read_part(0, half);
    read_part(half, region.sizes[dim] - half);
  }

  const InputFile& file_;
  const at::ScalarType dtype_;
  const uint64_t width_;
  at::Tensor block_;
};

/// Where a box that lies in a stored one lies in its file.
Region region_of(const StoredBox& stored, const TensorSlice& box, at::ScalarType dtype) {
  Region region{.offset = stored.offset, .sizes = box.sizes, .strides = stored.strides};
  for (size_t d = 0; d < box.sizes.size(); d++) {
    region.offset += static_cast<uint64_t>((box.offsets[d] - stored.box.offsets[d]) * stored.strides[d]) * c10::elementSize(dtype);
  }
  return region;
}

/// The part of a tensor with the sizes of `box` that is `part` of the box.
at::Tensor part_of(const at::Tensor& tensor, const TensorSlice& box, const TensorSlice& part) {
  auto result = tensor;
  for (size_t d = 0; d < box.sizes.size(); d++) {
    result = result.narrow(static_cast<int64_t>(d), part.offsets[d] - box.offsets[d], part.sizes[d]);
  }
  return result;
}

/// Calls `use` with stored boxes and parts of them that together are all of `box`, without overlap.
void for_each_part(const std::string& name, const StoredTensor& tensor, const TensorSlice& box, size_t first,
                   const std::function<void(const StoredBox& stored, const TensorSlice& part)>& use) {
  if (box.numel() == 0) return;
  auto missing = std::vector{box};
  const auto take_from = [&](const StoredBox& stored) {
    std::vector<TensorSlice> rest;
    for (const auto& wanted : missing) {
      const auto common = intersection(wanted, stored.box);
      if (common) use(stored, *common);
      std::ranges::move(common ? difference(wanted, stored.box) : std::vector{wanted}, std::back_inserter(rest));
    }
    missing = std::move(rest);
  };
  for (const bool is_first : {true, false}) {
    for (const auto& stored : tensor.boxes) {
      if ((stored.file == first) != is_first) continue;
      take_from(stored);
      if (missing.empty()) return;
    }
  }
  throw IoError(fmt::format("the files have not all values of '{}': the first that is missing is at [{}]", name,
                            fmt::join(std::ranges::min(missing, {}, &TensorSlice::offsets).offsets, ", ")));
}

std::vector<InputFile> open(const std::vector<std::filesystem::path>& paths) {
  std::vector<InputFile> files;
  for (const auto& path : paths) files.emplace_back(path);
  return files;
}

}  // namespace

void append(Catalog& all, Catalog part, const std::string& before) {
  const auto first = all.files.size();
  const auto where = part.files.empty() ? "" : part.files.front().string();
  std::ranges::move(part.files, std::back_inserter(all.files));
  for (auto& [name, tensor] : part.tensors) {
    for (auto& box : tensor.boxes) box.file += first;
    if (all.aliases.contains(before + name) || !all.tensors.emplace(before + name, std::move(tensor)).second)
      throw IoError(fmt::format("'{}{}' is in {} and in a file before it", before, name, where));
  }
  for (auto& bytes : part.checksums) {
    bytes.file += first;
    all.checksums.push_back(std::move(bytes));
  }
  for (const auto& [name, value] : part.values) all.values.emplace(before + name, value);
  for (const auto& [alias, name] : part.aliases) all.aliases.emplace(before + alias, before + name);
  for (const auto& [name, why] : part.left_out) all.left_out.emplace(before + name, why);
}

CatalogReader::CatalogReader(Catalog catalog) : CatalogReader(catalog, open(catalog.files)) {}

CatalogReader::CatalogReader(Catalog catalog, std::vector<InputFile> files) : catalog_(std::move(catalog)), files_(std::move(files)) {
  for (const auto& [name, tensor] : catalog_.tensors) expect_sound(name, tensor);
  for (const auto& bytes : catalog_.checksums) {
    const auto& file = files_.at(bytes.file);
    if (bytes.begin > file.size() || bytes.bytes > file.size() - bytes.begin) {
      throw IoError(fmt::format("{} is cut off: '{}' should end at byte {}, the file has {}", file.path().string(), bytes.name,
                                bytes.begin + bytes.bytes, file.size()));
    }
  }
}

void CatalogReader::expect_sound(const std::string& name, const StoredTensor& tensor) const {
  for (const auto& stored : tensor.boxes) {
    const auto& file = files_.at(stored.file);
    const auto refuse = [&](const std::string& why) {
      throw IoError(fmt::format("{} is damaged or cut off: '{}' {}", file.path().string(), name, why));
    };
    const auto& box = stored.box;
    if (box.shape != tensor.shape || !box.fits() || stored.strides.size() != box.sizes.size()) refuse("has a part outside of its shape");
    if (box.numel() == 0) continue;
    uint64_t last = 0, end = 0;
    for (size_t d = 0; d < box.sizes.size(); d++) {
      uint64_t steps = 0;
      const bool overflows =
          stored.strides[d] < 0 ||
          __builtin_mul_overflow(static_cast<uint64_t>(box.sizes[d] - 1), static_cast<uint64_t>(stored.strides[d]), &steps) ||
          __builtin_add_overflow(last, steps, &last);
      if (overflows) refuse("has strides that make no sense");
    }
    if (__builtin_mul_overflow(last + 1, c10::elementSize(tensor.dtype_in_files()), &end) ||
        __builtin_add_overflow(end, stored.offset, &end) || last + 1 == 0 || end > file.size()) {
      refuse(fmt::format("lies behind the end of the file, which has {} bytes", file.size()));
    }
    const auto values = static_cast<uint64_t>(box.numel());
    if (values > kMostUnchecked && values / kMostRepeats > last + 1) {  // no memory would be enough for what a few bytes promise
      refuse(fmt::format("is a view of [{}] that repeats {} stored values more than {} times; save a clone() of what is meant",
                         fmt::join(box.sizes, ", "), last + 1, kMostRepeats));
    }
  }
}

const StoredTensor& CatalogReader::info(const std::string& name) const {
  const auto found = catalog_.tensors.find(name);
  if (found == catalog_.tensors.end()) throw IoError(fmt::format("there is no tensor '{}' in the checkpoint", name));
  return found->second;
}

void CatalogReader::read(const std::string& name, const TensorSlice& box, const at::Tensor& to, size_t first) const {
  const auto& tensor = info(name);
  for_each_part(name, tensor, box, first, [&](const StoredBox& stored, const TensorSlice& part) {
    const auto dtype = tensor.dtype_in_files();
    RegionReader(files_[stored.file], dtype).read(region_of(stored, part, dtype), part_of(to, box, part));
  });
}

at::Tensor CatalogReader::read(const std::string& name) const {
  expect_complete(name);  // before memory is asked for, because a damaged file may promise a shape for which no memory is enough
  const auto& tensor = info(name);
  const auto result = at::empty(tensor.shape, at::TensorOptions(at::kCPU).dtype(tensor.dtype));
  read(name, whole_slice(tensor.shape), result);
  return result;
}

void CatalogReader::expect_complete(const std::string& name) const {
  const auto& tensor = info(name);
  for_each_part(name, tensor, whole_slice(tensor.shape), 0, [](const StoredBox&, const TensorSlice&) {});
}

void CatalogReader::verify(const StoredChecksum& bytes) const {
  const auto& file = files_.at(bytes.file);
  if (bytes.checksum == digest_of(file, bytes.begin, bytes.bytes, StoredDigest::kind_of(bytes.checksum))) return;
  throw IoError(fmt::format("{} is damaged: the bytes of '{}' are not those that were written, because they have another checksum",
                            file.path().string(), bytes.name));
}

std::string digest_of(const InputFile& file, uint64_t begin, uint64_t bytes, DigestKind kind) {
  StoredDigest digest(kind);
  std::vector<std::byte> block(std::min(kBlock, bytes));
  for (uint64_t done = 0; done < bytes; done += kBlock) {
    const auto part = std::span(block).first(std::min(kBlock, bytes - done));
    file.read(part.data(), part.size(), begin + done);
    digest.add(part);
  }
  return digest.text();
}

}  // namespace tessera::checkpoint
