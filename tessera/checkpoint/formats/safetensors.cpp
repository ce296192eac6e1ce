#include "tessera/checkpoint/formats/safetensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "tessera/base/error.h"
#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {
namespace {

// A file consists of the header's length as a little-endian number, the header as JSON, and the data of the tensors without gaps.
static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian, and their bytes are copied as they are");
constexpr uint64_t kLongestHeader = 100'000'000;  // the limit of Python's package
constexpr uint64_t kBlock = 1 << 20;              // bytes that stay in the cache between copying and the checksum

}  // namespace

SafetensorsFile::SafetensorsFile(InputFile file) : file_(std::move(file)) {
  read_header();
}

void SafetensorsFile::read_header() {
  if (file_.size() < kLengthBytes) throw IoError("{} is not a safetensors file: it has only {} bytes", path(), file_.size());
  uint64_t length = 0;
  file_.read(&length, sizeof length, 0);
  if (length > kLongestHeader) throw IoError("{} is not a safetensors file: it does not begin with the length of a header", path());
  if (length > file_.size() - kLengthBytes) {
    throw IoError("{} is not a safetensors file, or cut off: its header should have {} bytes, the file has {}", path(), length,
                  file_.size());
  }
  std::string text(length, '\0');
  file_.read(text.data(), length, kLengthBytes);
  data_ = kLengthBytes + length;
  Checksum all;
  all.add(std::as_bytes(std::span(&length, 1)));
  all.add(std::as_bytes(std::span(text)));
  header_checksum_ = all.value();
  try {
    header_ = SafetensorsHeader::parse(text, file_.size() - data_);
  } catch (const std::exception& error) {
    throw IoError("the header of {} is damaged: {}", path(), error.what());
  }
  index_.reserve(header_.places.size());
  for (size_t i = 0; i < header_.places.size(); i++) index_.emplace(header_.places[i].entry.name, i);
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& place : header_.places) names.push_back(place.entry.name);
  return names;
}

const SafetensorsFile::Place& SafetensorsFile::place(const std::string& name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) throw IoError("{} has no tensor '{}'", path(), name);
  return header_.places[found->second];
}

void SafetensorsFile::read_blocks(const Place& place, c10::function_ref<std::byte*(uint64_t begin)> target) const {
  Checksum checksum;
  for (uint64_t begin = 0, all = static_cast<uint64_t>(place.entry.bytes()); begin < all; begin += kBlock) {
    const auto count = std::min(kBlock, all - begin);
    auto* const block = target(begin);
    file_.read(block, count, data_ + place.begin + begin);
    if (!place.checksum.empty()) checksum.add({block, count});
  }
  if (place.checksum.empty() || place.checksum == Checksum::text(checksum.value())) return;
  throw IoError("{} is damaged: the bytes of '{}' are not those that were written, because they have another checksum", path(),
                place.entry.name);
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const auto& found = place(name);
  auto tensor = at::empty(found.entry.sizes, at::TensorOptions(at::kCPU).dtype(found.entry.dtype));
  auto* const bytes = static_cast<std::byte*>(tensor.mutable_data_ptr());
  read_blocks(found, [&](uint64_t begin) { return bytes + begin; });
  return tensor;
}

void SafetensorsFile::verify(const std::string& name) const {
  const auto& found = place(name);
  if (found.checksum.empty()) return;
  std::vector<std::byte> block(kBlock);
  read_blocks(found, [&](uint64_t) { return block.data(); });
}

Catalog read_safetensors(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  if (is_rank_file(file)) throw UsageError("{} is the part of one rank; give the folder {}", path, path.parent_path());
  Catalog catalog;
  add_safetensors(catalog, file);
  return catalog;
}

void add_safetensors(Catalog& catalog, const SafetensorsFile& file) {
  const auto number = catalog.files.size();
  catalog.files.push_back(file.path());
  for (const auto& [entry, begin, checksum] : file.places()) {
    const auto strides = c10::contiguous_strides(entry.sizes);
    const StoredBox all{.box = whole_slice(entry.sizes),
                        .file = number,
                        .offset = file.header_bytes() + begin,
                        .strides = {strides.begin(), strides.end()}};
    if (!catalog.tensors.emplace(entry.name, StoredTensor{.dtype = entry.dtype, .shape = entry.sizes, .boxes = {all}}).second)
      throw IoError("'{}' is in {} and in an earlier file", entry.name, file.path());
    if (checksum.empty()) continue;
    catalog.checksums.push_back(
        {.file = number, .begin = all.offset, .bytes = static_cast<uint64_t>(entry.bytes()), .checksum = checksum, .name = entry.name});
  }
  for (const auto& [alias, name] : file.metadata()) {
    if (file.contains(name) && !file.contains(alias)) catalog.aliases[alias] = name;
  }
  if (const auto save = file.metadata().find(kSaveKey); save != file.metadata().end())
    note_save(catalog, save_number(save->second, file.path().string()), file.path());
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsEntry> entries,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path),
      tensors_(path, std::move(entries)),
      header_(tensors_.all(), metadata),
      checksums_(checksum_of(header_.text)),
      file_(path) {
  const uint64_t length = header_.text.size();
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(std::as_bytes(std::span(header_.text)));
}

void SafetensorsWriter::write(const at::Tensor& tensor) {
  tensors_.expect_whole(tensor);
  append(tensor);
}

bool SafetensorsWriter::append(const at::Tensor& values) {
  const auto taken = tensors_.take(values);
  std::span<const std::byte> rest(static_cast<const std::byte*>(taken.values.const_data_ptr()), taken.values.nbytes());
  if (!checksum_) checksum_.emplace();
  while (!rest.empty()) {
    const auto block = rest.first(std::min<size_t>(kBlock, rest.size()));
    checksum_->add(block);
    file_.write(block);
    rest = rest.subspan(block.size());
  }
  if (!taken.ends) return false;
  checksums_ += Checksum::text(checksum_->value());
  checksum_.reset();
  return true;
}

std::vector<ReservedBytes> SafetensorsWriter::reserve() {
  std::vector<ReservedBytes> reserved;
  const uint64_t begin = kLengthBytes + header_.text.size();
  uint64_t end = begin;
  for (const auto& entry : tensors_.take_rest()) {
    reserved.push_back({.file = file_.part(), .offset = end});
    end += static_cast<uint64_t>(entry.bytes());
  }
  file_.reserve(end - begin);
  return reserved;
}

void SafetensorsWriter::close(std::span<const std::string> checksums) {
  for (const auto& each : checksums) checksums_ += each;
  tensors_.expect_none();
  file_.overwrite(kLengthBytes + header_.checksums, std::as_bytes(std::span(checksums_)));
  file_.commit();
  if (!file_.is_verified()) expect_stored();
}

void SafetensorsWriter::expect_stored() const {
  try {
    const SafetensorsFile file(path_);
    for (size_t i = 0; i < tensors_.all().size(); i++) {
      const auto& name = tensors_.all()[i].name;
      if (!file.contains(name) || file.checksum(name) != checksum_at(checksums_, i)) throw IoError("it lacks '{}' as written", name);
      file.verify(name);
    }
  } catch (const IoError& error) {
    throw IoError("{} was written, but the store gives other bytes back: {}; save again", path_, std::string(error.what()));
  }
}

}  // namespace tessera::checkpoint
