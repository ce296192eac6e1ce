#include "tessera/checkpoint/formats/safetensors.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

// A file consists of the header's length as a little-endian number, the header as JSON, and the data of the tensors without gaps.
static_assert(std::endian::native == std::endian::little, "the file is little-endian, and so are we");
constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kLongestHeader = 100'000'000;  // the limit of Python's package
constexpr auto kMetadata = "__metadata__";

struct Dtype {
  const char* name;
  at::ScalarType type;
};
constexpr std::array kDtypes = {Dtype{"F64", at::kDouble}, Dtype{"F32", at::kFloat}, Dtype{"F16", at::kHalf},  Dtype{"BF16", at::kBFloat16},
                                Dtype{"I64", at::kLong},   Dtype{"I32", at::kInt},   Dtype{"I16", at::kShort}, Dtype{"I8", at::kChar},
                                Dtype{"U8", at::kByte},    Dtype{"BOOL", at::kBool}};

const Dtype* dtype_named(const std::string& name) {
  const auto* const found = std::ranges::find_if(kDtypes, [&](const Dtype& dtype) { return dtype.name == name; });
  return found == kDtypes.end() ? nullptr : found;
}

const char* name_of(at::ScalarType type) {
  const auto* const found = std::ranges::find(kDtypes, type, &Dtype::type);
  return found == kDtypes.end() ? nullptr : found->name;
}

/// Parses the header. Throws IoError if two tensors have the same name; without this check, nlohmann's parser would silently keep the last.
nlohmann::json parse(const std::string& text) {
  std::set<std::string> seen;
  return nlohmann::json::parse(text, [&](int depth, nlohmann::json::parse_event_t event, const nlohmann::json& value) {
    if (event == nlohmann::json::parse_event_t::key && depth == 1 && !seen.insert(value.get<std::string>()).second) {
      throw IoError(fmt::format("the name '{}' comes twice", value.get<std::string>()));
    }
    return true;
  });
}

std::vector<int64_t> whole_numbers(const nlohmann::json& list, const char* what) {
  if (!list.is_array()) throw IoError(fmt::format("{} is no list", what));
  std::vector<int64_t> result;
  for (const auto& number : list) {
    if (!number.is_number_unsigned() || number.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
      throw IoError(
          fmt::format("{} has {} instead of a whole number", what, number.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)));
    }
    result.push_back(number.get<int64_t>());
  }
  return result;
}

/// The size of a tensor in bytes. Returns nothing if it overflows.
std::optional<int64_t> bytes_of(at::ScalarType dtype, const std::vector<int64_t>& sizes) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  if (std::ranges::count(sizes, 0) > 0) return 0;
  for (const auto size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

}  // namespace

int64_t SafetensorsEntry::bytes() const {
  return bytes_of(dtype, sizes).value_or(INT64_MAX);
}

SafetensorsFile::SafetensorsFile(std::filesystem::path path) : path_(std::move(path)) {
  fd_ = Fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status = {};
  if (!fd_ || ::fstat(fd_.get(), &status) != 0) throw IoError(fmt::format("can't open {}: {}", path_.string(), std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) throw IoError(fmt::format("{} is no file", path_.string()));
  const auto size = static_cast<uint64_t>(status.st_size);
  if (size < kLengthBytes) throw IoError(fmt::format("{} is no safetensors file: it has {} bytes", path_.string(), size));
  uint64_t length = 0;
  read_bytes(&length, sizeof length, 0);
  if (length > kLongestHeader || length > size - kLengthBytes) {
    throw IoError(fmt::format("{} is no safetensors file, or cut off: its header should have {} bytes, the file has {}", path_.string(),
                              length, size));
  }
  std::string header(length, '\0');
  read_bytes(header.data(), length, kLengthBytes);
  data_ = kLengthBytes + length;
  try {
    read_header(header);
    expect_gapless(size - data_);
  } catch (const nlohmann::json::exception& error) {
    throw IoError(fmt::format("the header of {} is damaged: {}", path_.string(), error.what()));
  } catch (const IoError& error) {
    throw IoError(fmt::format("{} is damaged: {}", path_.string(), error.what()));
  }
}

void SafetensorsFile::read_header(const std::string& header) {
  if (!header.starts_with('{')) throw IoError("its header does not begin with '{'");
  const auto json = parse(header);
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadata) {
      if (!value.is_object()) throw IoError("its metadata is not a list of texts by name");
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) throw IoError(fmt::format("the metadata '{}' is no text", key));
        metadata_[key] = text.get<std::string>();
      }
      continue;
    }
    const auto what = fmt::format("tensor '{}'", name);
    if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets")) {
      throw IoError(fmt::format("{} has no dtype, shape or data_offsets", what));
    }
    const auto* const dtype = value["dtype"].is_string() ? dtype_named(value["dtype"].get<std::string>()) : nullptr;
    if (dtype == nullptr) {
      std::vector<const char*> known;
      for (const auto& each : kDtypes) known.push_back(each.name);
      throw IoError(fmt::format("{} has the dtype {}, which is none of {}", what,
                                value["dtype"].dump(-1, ' ', true, nlohmann::json::error_handler_t::replace), fmt::join(known, ", ")));
    }
    const auto offsets = whole_numbers(value["data_offsets"], "data_offsets");
    auto sizes = whole_numbers(value["shape"], "shape");
    if (offsets.size() != 2) throw IoError(fmt::format("{} has {} data_offsets instead of 2", what, offsets.size()));
    const auto bytes = bytes_of(dtype->type, sizes);
    if (!bytes || *bytes != offsets[1] - offsets[0]) {
      throw IoError(fmt::format("{} of the shape [{}] in {} should have {} bytes, but lies from byte {} to {}", what,
                                fmt::join(sizes, ", "), dtype->name, bytes ? std::to_string(*bytes) : "too many", offsets[0], offsets[1]));
    }
    places_[name] = {.entry = {.name = name, .dtype = dtype->type, .sizes = std::move(sizes)}, .begin = static_cast<uint64_t>(offsets[0])};
  }
}

void SafetensorsFile::expect_gapless(uint64_t data_bytes) {
  std::vector<const Place*> order;
  for (const auto& [name, place] : places_) order.push_back(&place);
  // An empty tensor begins where the next one begins, so the size decides which comes first.
  std::ranges::sort(order, {}, [](const Place* place) { return std::pair(place->begin, place->entry.bytes()); });
  uint64_t end = 0;
  for (const auto* place : order) {
    if (place->begin != end) {
      throw IoError(
          fmt::format("tensor '{}' begins at byte {} of the data, the one before ends at {}", place->entry.name, place->begin, end));
    }
    end += static_cast<uint64_t>(place->entry.bytes());
    names_.push_back(place->entry.name);
  }
  if (end != data_bytes) throw IoError(fmt::format("its tensors have {} bytes, but {} are there", end, data_bytes));
}

const SafetensorsFile::Place& SafetensorsFile::place(const std::string& name) const {
  const auto found = places_.find(name);
  if (found == places_.end()) throw IoError(fmt::format("{} has no tensor '{}'", path_.string(), name));
  return found->second;
}

void SafetensorsFile::read_bytes(void* to, uint64_t count, uint64_t offset) const {
  auto* next = static_cast<char*>(to);
  while (count > 0) {
    const auto got = ::pread(fd_.get(), next, count, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError(fmt::format("can't read {}: {}", path_.string(), std::strerror(errno)));
    if (got == 0) throw IoError(fmt::format("{} has become shorter while it was read: it ends at byte {}", path_.string(), offset));
    next += got;
    count -= static_cast<uint64_t>(got);
    offset += static_cast<uint64_t>(got);
  }
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const auto& found = place(name);
  auto tensor = at::empty(found.entry.sizes, found.entry.dtype);
  read_bytes(tensor.mutable_data_ptr(), tensor.nbytes(), data_ + found.begin);
  return tensor;
}

namespace {

std::string header_of(const std::vector<SafetensorsEntry>& entries, const std::map<std::string, std::string>& metadata) {
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  int64_t end = 0;
  for (const auto& entry : entries) {
    const auto* const dtype = name_of(entry.dtype);
    if (dtype == nullptr) {
      throw UsageError(fmt::format("tensor '{}' is of dtype {}, which can't be saved; save a copy in another one", entry.name,
                                   c10::toString(entry.dtype)));
    }
    if (header.contains(entry.name)) throw UsageError(fmt::format("two tensors to save have the name '{}'", entry.name));
    header[entry.name] = {{"dtype", dtype}, {"shape", entry.sizes}, {"data_offsets", {end, end + entry.bytes()}}};
    end += entry.bytes();
  }
  auto text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned for every dtype
  return text;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsEntry> entries,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), entries_(std::move(entries)), file_(path) {
  const auto header = header_of(entries_, metadata);
  const uint64_t length = header.size();
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(bytes_of(header));
}

void SafetensorsWriter::write(const at::Tensor& tensor) {
  if (next_ == entries_.size()) throw UsageError(fmt::format("{} has all its {} tensors already", path_.string(), entries_.size()));
  const auto& entry = entries_[next_];
  if (tensor.scalar_type() != entry.dtype || tensor.sizes() != at::IntArrayRef(entry.sizes)) {
    throw UsageError(fmt::format("the next tensor of {} is '{}', {} of [{}], but was given {} of [{}]", path_.string(), entry.name,
                                 c10::toString(entry.dtype), fmt::join(entry.sizes, ", "), c10::toString(tensor.scalar_type()),
                                 fmt::join(tensor.sizes(), ", ")));
  }
  const auto values = tensor.detach().cpu().contiguous();
  file_.write(std::span(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()));
  next_++;
}

void SafetensorsWriter::close() {
  if (next_ < entries_.size()) {
    throw UsageError(
        fmt::format("{} was closed after {} of {} tensors; '{}' is missing", path_.string(), next_, entries_.size(), entries_[next_].name));
  }
  file_.commit();
}

}  // namespace tessera::checkpoint
