#include "tessera/checkpoint/stored/catalog.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/gguf/block_code.h"
#include "tessera/comm/simulation.h"

namespace tessera::checkpoint {
namespace {

constexpr uint64_t kMostRead = 1 << 20;       // bytes that are read at once
constexpr int64_t kSparse = 8;                // a span that has this many times the wanted values is read in parts,
constexpr uint64_t kSmallestRead = 4096;      // unless the parts are smaller than this
constexpr uint64_t kMostRepeats = 1024;       // a view, as of expand(), may have this many values for each stored value,
constexpr uint64_t kMostUnchecked = 1 << 26;  // or more for each if it has no more values than this in all

/// How values are stored in a file: in blocks, which have one value each unless there is a code.
struct Encoding {
  explicit Encoding(const StoredTensor& tensor)
      : dtype(tensor.dtype_in_files()),
        code(tensor.code),
        values(code == nullptr ? 1 : static_cast<uint64_t>(code->values)),
        bytes(code == nullptr ? c10::elementSize(dtype) : static_cast<uint64_t>(code->bytes)) {}

  at::ScalarType dtype;
  const BlockCode* code;
  uint64_t values, bytes;  // of a block
};

/// A strided view of values in a file: the values with the numbers first + i * strides, counted from byte `offset` on.
struct Region {
  uint64_t offset = 0;
  int64_t first = 0;
  std::vector<int64_t> sizes, strides;

  int64_t numel() const { return c10::multiply_integers(sizes); }
  /// The number of values from the first to the last.
  int64_t span() const {
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); d++) last += (sizes[d] - 1) * strides[d];
    return last + 1;
  }
  /// The dimension with the largest stride among those with more than one value, if any.
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
  RegionReader(const InputFile& file, Encoding encoding) : file_(file), encoding_(encoding) {}

  void read(const Region& region, const at::Tensor& to) {
    if (Simulation::current() != nullptr) return;  // tensors have no values
    const auto begin = static_cast<uint64_t>(region.first) / encoding_.values,
               end = (static_cast<uint64_t>(region.first + region.span()) + encoding_.values - 1) / encoding_.values;  // blocks
    const auto bytes = (end - begin) * encoding_.bytes, offset = region.offset + begin * encoding_.bytes;
    const bool fits_as_it_is = encoding_.code == nullptr && to.is_cpu() && to.scalar_type() == encoding_.dtype &&
                               to.strides() == at::IntArrayRef(region.strides) && to.is_non_overlapping_and_dense() &&
                               region.span() == region.numel();
    if (fits_as_it_is) return file_.read(to.mutable_data_ptr(), bytes, offset);
    const auto outer = region.outermost();
    if (outer && (bytes > kMostRead || reads_too_much(region, *outer))) return split(region, *outer, to);
    const auto values = static_cast<int64_t>((end - begin) * encoding_.values);
    if (!block_.defined() || block_.numel() < values) block_ = at::empty({values}, at::TensorOptions(at::kCPU).dtype(encoding_.dtype));
    encoding_.code == nullptr ? file_.read(block_.mutable_data_ptr(), bytes, offset) : decode(bytes, offset);
    to.copy_(block_.as_strided(region.sizes, region.strides, region.first - static_cast<int64_t>(begin * encoding_.values)));
  }

 private:
  void decode(uint64_t bytes, uint64_t offset) {
    coded_.resize(bytes);
    file_.read(coded_.data(), bytes, offset);
    auto* values = block_.mutable_data_ptr<float>();
    for (uint64_t at = 0; at < bytes; at += encoding_.bytes, values += encoding_.values) encoding_.code->decode(coded_.data() + at, values);
  }

  bool reads_too_much(const Region& region, size_t outer) const {
    const auto row = static_cast<uint64_t>(region.numel() / region.sizes[outer]) * encoding_.bytes / encoding_.values;
    return region.span() / region.numel() >= kSparse && row >= kSmallestRead;
  }

  void split(const Region& region, size_t dim, const at::Tensor& to) {
    const auto half = region.sizes[dim] / 2;
    const auto read_part = [&](int64_t begin, int64_t count) {
      auto part = region;
      part.first += begin * region.strides[dim];
      part.sizes[dim] = count;
      read(part, to.narrow(static_cast<int64_t>(dim), begin, count));
    };
    read_part(0, half);
    read_part(half, region.sizes[dim] - half);
  }

  const InputFile& file_;
  const Encoding encoding_;
  at::Tensor block_;
  std::vector<uint8_t> coded_;
};

/// Returns where in the file `box` is, which is inside the stored box.
Region region_of(const StoredBox& stored, const TensorSlice& box) {
  Region region{.offset = stored.offset, .first = stored.first, .sizes = box.sizes, .strides = stored.strides};
  for (size_t d = 0; d < box.sizes.size(); d++) region.first += (box.offsets[d] - stored.box.offsets[d]) * stored.strides[d];
  return region;
}

/// Throws IoError if parts of a tensor are missing.
void expect_none(const std::string& name, const std::vector<TensorSlice>& missing) {
  if (missing.empty()) return;
  throw IoError("the files lack values of '{}', the first of them at [{}]", name,
                joined(std::ranges::min(missing, {}, &TensorSlice::offsets).offsets));
}

std::vector<InputFile> open(const std::vector<std::filesystem::path>& paths) {
  std::vector<InputFile> files;
  for (const auto& path : paths) files.emplace_back(path);
  return files;
}

}  // namespace

std::vector<TensorSlice> for_each_part(const StoredTensor& tensor, const TensorSlice& box, size_t first,
                                       c10::function_ref<void(const StoredBox& stored, const TensorSlice& part)> use) {
  std::vector<TensorSlice> missing;
  if (box.numel() > 0) missing.push_back(box);
  for (const bool is_first : {true, false}) {
    for (const auto& stored : tensor.boxes) {
      if (missing.empty()) return missing;
      if ((stored.file == first) != is_first) continue;
      std::vector<TensorSlice> rest;
      for (const auto& wanted : missing) {
        const auto common = intersection(wanted, stored.box);
        if (common) use(stored, *common);
        std::ranges::move(common ? difference(wanted, stored.box) : std::vector{wanted}, std::back_inserter(rest));
      }
      missing = std::move(rest);
    }
  }
  return missing;
}

at::Tensor part_of(const at::Tensor& tensor, const TensorSlice& box, const TensorSlice& part) {
  auto result = tensor;
  for (size_t d = 0; d < box.sizes.size(); d++) {
    result = result.narrow(static_cast<int64_t>(d), part.offsets[d] - box.offsets[d], part.sizes[d]);
  }
  return result;
}

uint64_t save_number(std::string_view text, const std::string& file) {
  uint64_t number = 0;
  const auto* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  if (error == std::errc() && end == last) return number;
  throw IoError("{} is damaged: the number of its save, '{}', is not a number", file, printable(text));
}

void note_save(Catalog& catalog, std::optional<uint64_t> number, const std::filesystem::path& file) {
  if (!number) return;
  if (!catalog.save) catalog.save = {.number = *number, .file = file};
  if (catalog.save->number == *number) return;
  throw IoError("{} and {} come from different saves; somebody has mixed the files of two checkpoints", catalog.save->file, file);
}

void append(Catalog& all, Catalog part, const std::string& before) {
  if (part.save) note_save(all, part.save->number, part.save->file);
  const auto first = all.files.size();
  const auto where = part.files.empty() ? "" : part.files.front().string();
  std::ranges::move(part.files, std::back_inserter(all.files));
  for (auto& [name, tensor] : part.tensors) {
    for (auto& box : tensor.boxes) box.file += first;
    if (all.aliases.contains(before + name) || !all.tensors.emplace(before + name, std::move(tensor)).second)
      throw IoError("'{}{}' is in {} and in an earlier file", before, name, where);
  }
  for (auto& bytes : part.checksums) {
    bytes.file += first;
    all.checksums.push_back(std::move(bytes));
  }
  for (const auto& [name, value] : part.values) all.values.emplace(before + name, value);
  for (const auto& [alias, name] : part.aliases) all.aliases.emplace(before + alias, before + name);
  for (const auto& [name, why] : part.left_out) all.left_out.emplace(before + name, why);
  std::ranges::move(part.faults, std::back_inserter(all.faults));
}

CatalogReader::CatalogReader(Catalog catalog) : CatalogReader(catalog, open(catalog.files)) {}

CatalogReader::CatalogReader(Catalog catalog, std::vector<InputFile> files) : catalog_(std::move(catalog)), files_(std::move(files)) {
  for (const auto& [name, tensor] : catalog_.tensors) expect_sound(name, tensor);
  for (const auto& bytes : catalog_.checksums) {
    const auto& file = files_.at(bytes.file);
    if (bytes.begin > file.size() || bytes.bytes > file.size() - bytes.begin) {
      throw IoError("{} is cut off: '{}' should end at byte {}, the file has {}", file.path(), bytes.name, bytes.begin + bytes.bytes,
                    file.size());
    }
  }
}

void CatalogReader::expect_sound(const std::string& name, const StoredTensor& tensor) const {
  for (const auto& stored : tensor.boxes) {
    const auto& file = files_.at(stored.file);
    const auto refuse = [&](const std::string& why) { throw IoError("{} is damaged or cut off: '{}' {}", file.path(), name, why); };
    const auto& box = stored.box;
    if (box.shape != tensor.shape || !box.fits() || stored.strides.size() != box.sizes.size()) refuse("has a part outside of its shape");
    if (box.numel() == 0) continue;
    const Encoding encoding(tensor);
    if (stored.first < 0) refuse("has a negative offset");
    auto last = static_cast<uint64_t>(stored.first);
    uint64_t end = 0;
    for (size_t d = 0; d < box.sizes.size(); d++) {
      uint64_t steps = 0;
      const bool overflows =
          stored.strides[d] < 0 ||
          __builtin_mul_overflow(static_cast<uint64_t>(box.sizes[d] - 1), static_cast<uint64_t>(stored.strides[d]), &steps) ||
          __builtin_add_overflow(last, steps, &last);
      if (overflows) refuse("has strides that make no sense");
    }
    if (__builtin_mul_overflow(last / encoding.values + 1, encoding.bytes, &end) || __builtin_add_overflow(end, stored.offset, &end) ||
        last + 1 == 0 || end > file.size()) {
      refuse(fmt::format("extends past the end of the file, which has {} bytes", file.size()));
    }
    const auto values = static_cast<uint64_t>(box.numel());
    if (values > kMostUnchecked && values / kMostRepeats > last + 1) {  // a small file could ask for more memory than there is
      refuse(fmt::format("is a view of [{}] that repeats {} stored values more than {} times; save a clone() of the values you need",
                         fmt::join(box.sizes, ", "), last + 1, kMostRepeats));
    }
  }
}

const StoredTensor& CatalogReader::info(const std::string& name) const {
  const auto found = catalog_.tensors.find(name);
  if (found == catalog_.tensors.end()) throw IoError("there is no tensor '{}' in the checkpoint", name);
  return found->second;
}

void CatalogReader::read(const std::string& name, const TensorSlice& box, const at::Tensor& to, size_t first) const {
  const auto& tensor = info(name);
  expect_none(name, for_each_part(tensor, box, first, [&](const StoredBox& stored, const TensorSlice& part) {
                RegionReader(files_[stored.file], Encoding(tensor)).read(region_of(stored, part), part_of(to, box, part));
              }));
}

at::Tensor CatalogReader::read(const std::string& name) const {
  expect_complete(name);  // before at::empty(), because a damaged file may give a shape that fits into no memory
  const auto& tensor = info(name);
  const auto result = at::empty(tensor.shape, at::TensorOptions(at::kCPU).dtype(tensor.dtype));
  read(name, whole_slice(tensor.shape), result);
  return result;
}

void CatalogReader::expect_complete(const std::string& name) const {
  const auto& tensor = info(name);
  expect_none(name, for_each_part(tensor, whole_slice(tensor.shape), 0, [](const StoredBox&, const TensorSlice&) {}));
}

void CatalogReader::verify(const StoredChecksum& bytes) const {
  if (!is_as_written(bytes)) throw IoError(damage(bytes));
}

bool is_of_header(const StoredChecksum& bytes) {
  return bytes.begin == 0 && bytes.name == kHeaderName;
}

void CatalogReader::verify_headers() const {
  for (const auto& bytes : catalog_.checksums) {
    if (is_of_header(bytes)) verify(bytes);
  }
}

bool CatalogReader::is_as_written(const StoredChecksum& bytes) const {
  if (Simulation::current() != nullptr) return true;  // nothing is read
  return bytes.checksum == digest_of(files_.at(bytes.file), bytes.begin, bytes.bytes, StoredDigest::kind_of(bytes.checksum));
}

std::string CatalogReader::damage(const StoredChecksum& bytes) const {
  return fmt::format("{} is damaged: the bytes of '{}' are not those that were written, because they have another checksum",
                     files_.at(bytes.file).path().string(), bytes.name);
}

std::string digest_of(const InputFile& file, uint64_t begin, uint64_t bytes, DigestKind kind) {
  StoredDigest digest(kind);
  std::vector<std::byte> block(std::min(kMostRead, bytes));
  for (uint64_t done = 0; done < bytes; done += kMostRead) {
    const auto part = std::span(block).first(std::min(kMostRead, bytes - done));
    file.read(part.data(), part.size(), begin + done);
    digest.add(part);
  }
  return digest.text();
}

}  // namespace tessera::checkpoint
