#include "tessera/checkpoint/convert/fill.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>

#include "tessera/base/atomic_write.h"
#include "tessera/base/input_file.h"
#include "tessera/checkpoint/formats/torch/zip.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

/// Calls `use` with each run of values of a box that is contiguous in the tensor, and with the index in the tensor at which the run begins.
void for_each_run(const TensorSlice& box, const at::Tensor& values, c10::function_ref<void(int64_t begin, const at::Tensor& run)> use) {
  const auto strides = c10::contiguous_strides(box.shape);
  size_t inner = box.shape.size();  // from this dimension on, the box spans the whole tensor
  while (inner > 0 && box.sizes[inner - 1] == box.shape[inner - 1]) inner--;
  if (inner > 0) inner--;  // the box has a range of this dimension
  int64_t begin = 0, numel = 1;
  for (size_t d = 0; d < box.shape.size(); d++) begin += box.offsets[d] * strides[d];
  for (size_t d = inner; d < box.shape.size(); d++) numel *= box.sizes[d];
  const auto flat = values.contiguous().as_strided({values.numel()}, {1});
  for (int64_t done = 0; done < flat.numel(); done += numel) {
    int64_t place = begin, rest = done / numel;
    for (size_t d = inner; d-- > 0; rest /= box.sizes[d]) place += rest % box.sizes[d] * strides[d];
    use(place, flat.narrow(0, done, numel));
  }
}

/// Ends each entry with a zero byte, the only byte that paths can't have.
std::string to_text(const std::vector<ReservedBytes>& reserved) {
  std::string text;
  for (const auto& bytes : reserved) text += fmt::format("{} {}", bytes.offset, bytes.file.string()) + '\0';
  return text;
}

std::vector<ReservedBytes> from_text(const std::string& text) {
  std::vector<ReservedBytes> reserved;
  for (size_t begin = 0, end; (end = text.find('\0', begin)) != std::string::npos; begin = end + 1) {
    const auto space = text.find(' ', begin);
    reserved.push_back({.file = text.substr(space + 1, end - space - 1), .offset = std::stoull(text.substr(begin, space - begin))});
  }
  return reserved;
}

std::span<const std::byte> bytes_of(const at::Tensor& values) {
  return {static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()};
}

/// Values that are contiguous in a tensor, and the checksum of their bytes.
struct Part {
  int64_t begin = 0, numel = 0;
  StoredDigest digest;
};
/// From the index of a tensor to the begin, the number of values and the checksum of each of its parts. Processes exchange such maps.
using Told = std::map<size_t, std::vector<std::tuple<int64_t, int64_t, std::string>>>;

/// If a process writes more parts of a tensor than this, checksums are not joined; instead, a process reads the tensor back from its file.
constexpr size_t kMostParts = 16;

/// Returns the CRC of two runs of bytes, one after the other, given the CRC of each and the length of the second.
std::string joined_text(const std::string& first, const std::string& second, uint64_t second_bytes) {
  const auto number = [](const std::string& text) { return static_cast<uint32_t>(std::stoul(text, nullptr, 16)); };
  return fmt::format("{:08x}", joined_crc32(number(first), number(second), second_bytes));
}

/// Returns the checksum of a tensor from the checksums of its parts; nothing if parts are missing or can't be joined.
std::optional<std::string> whole_digest(std::vector<std::tuple<int64_t, int64_t, std::string>> parts, const SourceTensor& tensor,
                                        DigestKind kind) {
  std::ranges::sort(parts);
  const auto bytes = c10::elementSize(tensor.dtype);
  int64_t end = 0;
  std::optional<std::string> all;
  for (const auto& [begin, numel, text] : parts) {
    if (begin != end || (all && kind != DigestKind::Crc32)) return std::nullopt;
    all = all ? joined_text(*all, text, static_cast<uint64_t>(numel) * bytes) : text;
    end += numel;
  }
  return end == c10::multiply_integers(tensor.shape) ? all : std::nullopt;
}

/// The work of one process in fill_reserved().
class Filling {
 public:
  Filling(const RunSource& source, const std::vector<SourceTensor>& tensors, const std::vector<ReservedBytes>& reserved, DigestKind kind)
      : source_(source), tensors_(tensors), reserved_(reserved), kind_(kind) {}

  /// Writes the boxes of this process, and returns their parts.
  Told write() {
    Told told;
    for (size_t i = 0; i < tensors_.size(); i++) {
      std::vector<Part> parts;
      for (const int rank : source_.ranks()) {
        for (const auto& box : source_.boxes(tensors_[i], rank)) {
          source_.copy(
              tensors_[i], box, [&](const TensorSlice& piece, const at::Tensor& values) { write(i, piece, values, parts); },
              source_.file_of(rank));
        }
      }
      if (parts.size() > kMostParts) continue;
      for (const auto& part : parts) told[i].emplace_back(part.begin, part.numel, part.digest.text());
    }
    if (file_) file_->close();
    return told;
  }

  /// Reads a tensor that several processes have written, and returns its checksum.
  std::string digest(size_t i) const {
    return digest_of(InputFile(reserved_[i].file), reserved_[i].offset, static_cast<uint64_t>(tensors_[i].bytes()), kind_);
  }

 private:
  /// Returns the file of a tensor. Only one file is open at a time, since the tensors of a file come one after the other.
  UnfinishedFile& file_of(size_t i) {
    if (file_ && opened_ == reserved_[i].file) return *file_;
    if (file_) file_->close();
    file_.emplace(opened_ = reserved_[i].file);
    return *file_;
  }

  void write(size_t i, const TensorSlice& piece, const at::Tensor& values, std::vector<Part>& parts) {
    auto& file = file_of(i);
    for_each_run(piece, values, [&](int64_t begin, const at::Tensor& run) {
      file.write(reserved_[i].offset + static_cast<uint64_t>(begin) * run.element_size(), bytes_of(run));
      // Only CRCs of several parts can be joined; another checksum needs a single part, from the tensor's first value on.
      const bool goes_on = !parts.empty() && parts.back().begin + parts.back().numel == begin;
      if (parts.size() > kMostParts || (kind_ != DigestKind::Crc32 && (goes_on ? parts.size() > 1 : begin > 0))) return;
      if (!goes_on) parts.push_back({.begin = begin, .digest = StoredDigest(kind_)});
      parts.back().digest.add(bytes_of(run));
      parts.back().numel += run.numel();
    });
  }

  const RunSource& source_;
  const std::vector<SourceTensor>& tensors_;
  const std::vector<ReservedBytes>& reserved_;
  const DigestKind kind_;
  std::filesystem::path opened_;
  std::optional<UnfinishedFile> file_;
};

}  // namespace

std::vector<std::string> fill_reserved(const RunSource& source, const std::vector<SourceTensor>& tensors,
                                       const std::vector<ReservedBytes>& reserved, DigestKind kind) {
  const auto plan = from_text(source.texts(to_text(reserved)).front());
  Filling filling(source, tensors, plan, kind);
  Told told;
  source.on_each([&] {
    std::set<std::filesystem::path> files;
    for (const auto& bytes : plan) files.insert(bytes.file);
    for (const auto& file : files) source.expect_seen(file);
    told = filling.write();
  });
  std::map<size_t, std::string> known, read;
  Told all;
  for (const auto& text : source.texts(json(told).dump())) {
    for (auto& [i, parts] : json::parse(text).get<Told>()) all[i].insert(all[i].end(), parts.begin(), parts.end());
  }
  for (size_t i = 0; i < tensors.size(); i++) {
    if (auto digest = whole_digest(all[i], tensors[i], kind)) known[i] = std::move(*digest);
  }
  // Each process reads some of the tensors whose parts could not be joined.
  source.on_each([&] {
    for (size_t i = 0, number = 0; i < tensors.size(); i++) {
      if (!known.contains(i) && source.is_for_me(number++)) read[i] = filling.digest(i);
    }
  });
  for (const auto& text : source.texts(json(read).dump())) known.merge(json::parse(text).get<std::map<size_t, std::string>>());
  std::vector<std::string> digests;
  for (auto& [number, text] : known) digests.push_back(std::move(text));
  return digests;
}

}  // namespace tessera::checkpoint
