#include "tessera/checkpoint/formats/safetensors_header.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/numel.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/formats/damage.h"
#include "tessera/checkpoint/formats/dtype_names.h"
#include "tessera/checkpoint/formats/json_fault.h"

namespace tessera::checkpoint {
namespace {

constexpr auto kMetadata = "__metadata__";
constexpr auto kChecksums = "xxh3_64";  // the key of the checksums in the metadata

/// The size of a tensor in bytes. Returns nothing if it overflows.
std::optional<int64_t> bytes_of(at::ScalarType dtype, const std::vector<int64_t>& sizes) {
  return checked_numel(sizes, static_cast<int64_t>(c10::elementSize(dtype)));
}

/// Parses the header in one pass, without building a tree of JSON values.
class Parser final : public nlohmann::json_sax<nlohmann::json> {
 public:
  SafetensorsHeader header;

  bool start_object(size_t /*size*/) override {
    depth_++;
    if (depth_ == 1) return true;
    if (depth_ == 2 && !in_list_) {
      tensor_ = {};
      return true;
    }
    return unexpected("an object");
  }

  bool end_object() override {
    depth_--;
    if (depth_ == 1 && key_ != kMetadata) add_tensor();
    return true;
  }

  bool key(string_t& name) override {
    if (depth_ == 1) {
      key_ = name;
    } else {
      field_ = name;
      if (key_ == kMetadata && header.metadata.contains(name)) throw IoError("the metadata '{}' occurs twice", name);
    }
    return true;
  }

  bool string(string_t& text) override {
    if (depth_ != 2 || in_list_) return unexpected("a text");
    if (key_ == kMetadata) {
      header.metadata.emplace(field_, std::move(text));
    } else if (field_ == "dtype" && !tensor_.dtype) {
      tensor_.dtype = std::move(text);
    } else {
      return unexpected("a text");
    }
    return true;
  }

  bool start_array(size_t /*size*/) override {
    const bool shape = field_ == "shape" && !tensor_.shape, offsets = field_ == "data_offsets" && !tensor_.offsets;
    if (depth_ != 2 || in_list_ || key_ == kMetadata || (!shape && !offsets)) return unexpected("a list");
    in_list_ = true;
    (shape ? tensor_.shape : tensor_.offsets).emplace();
    return true;
  }

  bool end_array() override {
    in_list_ = false;
    return true;
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (!in_list_ || number > static_cast<uint64_t>(INT64_MAX)) return unexpected(std::to_string(number));
    (field_ == "shape" ? tensor_.shape : tensor_.offsets)->push_back(static_cast<int64_t>(number));
    return true;
  }

  bool number_integer(number_integer_t number) override { return unexpected(std::to_string(number)); }
  bool number_float(number_float_t /*number*/, const string_t& text) override { return unexpected(text); }
  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool binary(binary_t& /*bytes*/) override { return unexpected("binary data"); }
  bool parse_error(size_t /*place*/, const std::string& /*token*/, const nlohmann::json::exception& error) override {
    throw IoError(fault_of(error));
  }

 private:
  struct Tensor {
    std::optional<std::string> dtype = {};
    std::optional<std::vector<int64_t>> shape = {}, offsets = {};
  };

  [[noreturn]] bool unexpected(const std::string& what) const {
    if (depth_ == 1) throw IoError("'{}' is {} instead of an object", key_, what);
    if (key_ == kMetadata) throw IoError("the metadata '{}' is {} instead of a text", field_, what);
    throw IoError("tensor '{}' has {} where a dtype, a shape or data_offsets should be{}", key_, what,
                  field_.empty() ? "" : fmt::format(" (at '{}')", field_));
  }

  void add_tensor() {
    if (!tensor_.dtype || !tensor_.shape || !tensor_.offsets) {
      throw IoError("tensor '{}' has no dtype, shape or data_offsets", key_);
    }
    try {
      const auto dtype = dtype_named(*tensor_.dtype);
      const auto& offsets = *tensor_.offsets;
      if (offsets.size() != 2) throw IoError("has {} data_offsets instead of 2", offsets.size());
      const auto bytes = bytes_of(dtype, *tensor_.shape);
      if (!bytes || *bytes != offsets[1] - offsets[0]) {
        throw IoError("of the shape [{}] in {} should have {} bytes, but lies from byte {} to {}", joined(*tensor_.shape), *tensor_.dtype,
                      bytes ? std::to_string(*bytes) : "too many", offsets[0], offsets[1]);
      }
      header.places.push_back(
          {.entry = {.name = key_, .dtype = dtype, .sizes = std::move(*tensor_.shape)}, .begin = static_cast<uint64_t>(offsets[0])});
    } catch (const IoError& error) {
      throw IoError("tensor '{}' {}", key_, error.what());
    }
    field_.clear();
  }

  int depth_ = 0;
  bool in_list_ = false;
  std::string key_, field_;
  Tensor tensor_;
};

void expect_different_names(const SafetensorsHeader& header) {
  std::unordered_set<std::string_view> seen;
  seen.reserve(header.places.size());
  for (const auto& place : header.places) {
    if (!seen.insert(place.entry.name).second) throw IoError("the name '{}' occurs twice", place.entry.name);
  }
}

/// Puts the places in order. Throws IoError if they leave gaps, overlap, or do not end where the data ends.
void expect_gapless(SafetensorsHeader& header, uint64_t data_bytes) {
  // An empty tensor and the tensor after it begin at the same byte, so the smaller one comes first.
  std::ranges::stable_sort(header.places, {}, [](const auto& place) { return std::pair(place.begin, place.entry.bytes()); });
  uint64_t end = 0;
  for (const auto& place : header.places) {
    if (place.begin != end) {
      throw IoError("tensor '{}' begins at byte {} of the data, the one before ends at {}", place.entry.name, place.begin, end);
    }
    end += static_cast<uint64_t>(place.entry.bytes());
  }
  if (end != data_bytes) throw IoError("its tensors have {} bytes, but {} are there", end, data_bytes);
}

/// Takes the checksums of the tensors from the metadata. Throws IoError if the header does not have its own checksum.
void take_checksums(SafetensorsHeader& header, std::string_view text) {
  const auto found = header.metadata.find(kChecksums);
  if (found == header.metadata.end()) return;
  const std::string all = std::move(found->second);
  header.metadata.erase(found);
  expect_as_written(text, all, header.places.size(), kChecksums);
  for (size_t i = 0; i < header.places.size(); i++) header.places[i].checksum = checksum_at(all, i);
}

}  // namespace

int64_t SafetensorsEntry::bytes() const {
  return bytes_of(dtype, sizes).value_or(INT64_MAX);
}

void expect_writable_name(const std::string& name) {
  if (!is_utf8(name))
    throw UsageError("the tensor '{}' can't be saved, because its name is not UTF-8; rename the tensor or its module", printable(name));
  if (name == kMetadata) throw UsageError("the tensor '{}' can't be saved, because safetensors files reserve this name; rename it", name);
}

SafetensorsHeader SafetensorsHeader::parse(std::string_view text, uint64_t data_bytes) {
  if (!text.starts_with('{')) throw IoError("it does not begin with '{'");
  Parser parser;
  nlohmann::json::sax_parse(text, &parser);
  expect_different_names(parser.header);
  expect_gapless(parser.header, data_bytes);
  take_checksums(parser.header, text);
  return std::move(parser.header);
}

SafetensorsHeaderText::SafetensorsHeaderText(const std::vector<SafetensorsEntry>& entries,
                                             const std::map<std::string, std::string>& metadata) {
  if (metadata.contains(kChecksums)) throw UsageError("the metadata key '{}' is reserved for checksums; use another key", kChecksums);
  const auto quoted = [](const std::string& text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  text = fmt::format(R"({{"{}":{{"{}":")", kMetadata, kChecksums);
  checksums = text.size();
  text.append(Checksum::kDigits * (entries.size() + 1), '0').append("\"");
  for (const auto& [name, value] : metadata) text += fmt::format(",{}:{}", quoted(name), quoted(value));
  text += "}";
  int64_t end = 0;
  std::unordered_set<std::string_view> seen;
  for (const auto& entry : entries) {
    const auto* const dtype = name_of(entry.dtype);
    if (dtype == nullptr) {
      throw UsageError("tensor '{}' is of dtype {}, which can't be saved; save a copy in another dtype", entry.name,
                       c10::toString(entry.dtype));
    }
    expect_writable_name(entry.name);
    if (!seen.insert(entry.name).second) throw UsageError("two tensors to save have the name '{}'", entry.name);
    const auto begin = end;
    if (__builtin_add_overflow(begin, entry.bytes(), &end)) {
      throw UsageError("tensor '{}' of the shape [{}] does not fit into a file", entry.name, joined(entry.sizes));
    }
    text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", quoted(entry.name), dtype,
                        fmt::join(entry.sizes, ","), begin, end);
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned for every dtype
}

}  // namespace tessera::checkpoint
