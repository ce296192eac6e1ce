#include "tessera/checkpoint/formats/gguf/gguf.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/damage.h"
#include "tessera/checkpoint/formats/gguf/parts.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {
namespace {

constexpr uint64_t kMostDims = 4;
constexpr uint64_t kLongest = 1 << 28;  // most bytes of a text, and most elements of a list
constexpr auto kAlignmentKey = "general.alignment", kArchitectureKey = "general.architecture";

/// Returns the size of a number of this type in bytes; 0 for texts and lists.
uint64_t width_of(GgufType type) {
  uint64_t width = 0;
  if (type != GgufType::Text && type != GgufType::Array) with_number(type, [&]<class T>(T) { width = sizeof(T); });
  return width;
}

bool has_magic(const InputFile& file) {
  constexpr std::string_view kMagic(kGgufMagic, sizeof kGgufMagic);
  return file.size() >= kMagic.size() && file.read_first(kMagic.size()) == kMagic;
}

bool is_real(GgufType type) {
  return type == GgufType::F32 || type == GgufType::F64;
}

/// Reads a header from its beginning to its end.
class HeaderReader {
 public:
  explicit HeaderReader(const InputFile& file) : refuse(file.path().string() + " is damaged or cut off: "), file_(file) {}

  const Damage refuse;
  const std::filesystem::path& path() const { return file_.path(); }
  uint64_t at() const { return at_; }
  uint64_t left() const { return file_.size() - at_; }

  template <class T>
  T number() {
    T value;
    take(&value, sizeof value);
    return value;
  }

  std::string text(const std::string& what) {
    const auto length = number<uint64_t>();
    if (length > kLongest) refuse("{} should have {} bytes", what, length);
    if (length > left()) refuse("{} should have {} bytes, but {} are left", what, length, left());
    std::string value(length, '\0');
    take(value.data(), length);
    return value;
  }

  GgufValue value(const std::string& key) {
    const auto type = type_of(number<uint32_t>(), key);
    if (type != GgufType::Array) return single(type, key);
    const auto of = type_of(number<uint32_t>(), key);
    const auto count = number<uint64_t>();
    const auto least = of == GgufType::Text ? sizeof(uint64_t) : width_of(of);
    if (of == GgufType::Array) refuse("'{}' is a list of lists", key);
    if (count > kLongest) refuse("'{}' should have {} elements", key, count);
    if (count > left() / least) refuse("'{}' should have {} elements, but {} bytes are left", key, count, left());
    if (of == GgufType::Text) return {of, list<std::string>(count, [&] { return text(key); })};
    if (is_real(of)) return {of, list<double>(count, [&] { return std::get<double>(single(of, key).data); })};
    return {of, list<int64_t>(count, [&] { return std::get<int64_t>(single(of, key).data); })};
  }

 private:
  GgufType type_of(uint32_t number, const std::string& key) const {
    if (number > static_cast<uint32_t>(GgufType::F64)) refuse("'{}' has the type {}, which does not exist", key, number);
    return static_cast<GgufType>(number);
  }

  GgufValue single(GgufType type, const std::string& key) {
    if (type == GgufType::Text) return {type, text(key)};
    GgufValue result{.type = type};
    with_number(type, [&]<class T>(T) {
      const auto read = number<T>();
      if constexpr (std::is_same_v<T, uint64_t>) {
        if (!std::in_range<int64_t>(read)) refuse("'{}' is {}, which is too large", key, read);
      }
      if constexpr (std::is_floating_point_v<T>) {
        result.data = static_cast<double>(read);
      } else {
        result.data = static_cast<int64_t>(read);
      }
    });
    return result;
  }

  template <class T>
  static std::vector<T> list(uint64_t count, const auto& next) {
    std::vector<T> values;
    for (uint64_t i = 0; i < count; i++) values.push_back(next());
    return values;
  }

  void take(void* to, uint64_t count) {
    if (count > left()) refuse("its header continues past the end of the file at byte {}", file_.size());
    auto* bytes = static_cast<char*>(to);
    while (count > 0) {
      if (at_ < begin_ || at_ >= begin_ + buffer_.size()) {
        begin_ = at_;
        buffer_.resize(std::min<uint64_t>(kBuffer, left()));
        file_.read(buffer_.data(), buffer_.size(), begin_);
      }
      const auto here = std::min<uint64_t>(count, begin_ + buffer_.size() - at_);
      std::memcpy(bytes, buffer_.data() + (at_ - begin_), here);
      bytes += here;
      at_ += here;
      count -= here;
    }
  }

  static constexpr uint64_t kBuffer = 1 << 20;
  const InputFile& file_;
  uint64_t at_ = 0, begin_ = 0;
  std::string buffer_;
};

GgufTensor read_tensor(HeaderReader& header) {
  GgufTensor tensor{.name = header.text("the name of a tensor"), .sizes = {}};
  const auto dims = header.number<uint32_t>();
  if (dims > kMostDims) header.refuse("'{}' has {} dimensions", tensor.name, dims);
  for (uint32_t d = 0; d < dims; d++) {
    const auto size = header.number<uint64_t>();
    if (!std::in_range<int64_t>(size)) header.refuse("'{}' has a dimension of {}", tensor.name, size);
    tensor.sizes.insert(tensor.sizes.begin(), static_cast<int64_t>(size));
  }
  const auto number = header.number<uint32_t>();
  tensor.code = find_block_code(number);
  if (tensor.code == nullptr) {
    std::vector<std::string_view> names;
    for (const auto& code : block_codes()) names.push_back(code.name);
    const auto name = name_of_block_code(number);
    throw IoError(
        "{}: '{}' has the ggml type {}, which Tessera does not read; it reads the types {}; run llama-quantize on the original model to "
        "get one of these",
        header.path(), tensor.name,
        name.empty() ? fmt::format("{} (unknown: the file is damaged, or of a newer ggml)", number) : std::string(name), joined(names));
  }
  tensor.offset = header.number<uint64_t>();
  return tensor;
}

/// Throws IoError unless the tensor's rows are whole blocks that lie in the file.
void expect_sound(const HeaderReader& header, const GgufTensor& tensor, uint64_t size_of_file) {
  const auto wide = checked_numel(tensor.sizes, sizeof(float));  // bytes of its values in float32
  if (!wide) header.refuse("the shape of '{}' has more values than any file can hold", tensor.name);
  const auto values = *wide / static_cast<int64_t>(sizeof(float));
  const auto row = tensor.sizes.empty() ? 1 : tensor.sizes.back();
  if (row % tensor.code->values != 0)
    header.refuse("'{}' has rows of {} values, which is not a multiple of the block size {}", tensor.name, row, tensor.code->values);
  uint64_t bytes = 0, end = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(values / tensor.code->values), static_cast<uint64_t>(tensor.code->bytes), &bytes) ||
      __builtin_add_overflow(bytes, tensor.offset, &end) || end > size_of_file) {
    header.refuse("'{}' extends past the end of the file, which has {} bytes", tensor.name, size_of_file);
  }
}

/// Returns the boxes of a tensor in a file that interleaves the two halves of each head's rows. In Hugging Face's order, the rows of a
/// head's first half come before those of its second half.
std::vector<StoredBox> boxes_of_pairs(const GgufTensor& tensor, int64_t heads) {
  const auto rows = tensor.sizes[0], row = c10::multiply_integers(tensor.sizes) / std::max<int64_t>(rows, 1), half = rows / heads / 2;
  std::vector<StoredBox> boxes;
  for (int64_t head = 0; head < heads; head++) {
    for (int64_t second = 0; second < 2; second++) {
      StoredBox box{
          .box = whole_slice(tensor.sizes), .offset = tensor.offset, .first = (2 * head * half + second) * row, .strides = {2 * row}};
      box.box.offsets[0] = (2 * head + second) * half;
      box.box.sizes[0] = half;
      if (tensor.sizes.size() == 2) box.strides.push_back(1);
      boxes.push_back(std::move(box));
    }
  }
  return boxes;
}

/// Decodes float32 values to which 1 was added.
constexpr BlockCode kLessOne{.name = "F32", .bytes = sizeof(float), .decode = [](const uint8_t* block, float* value) {
                               std::memcpy(value, block, sizeof *value);
                               *value -= 1;
                             }};

StoredTensor stored_of(const GgufTensor& tensor) {
  StoredTensor stored{.dtype = at::kFloat, .shape = tensor.sizes};
  if (tensor.code->name == "F16") stored.dtype = at::kHalf;
  if (tensor.code->name == "BF16") stored.dtype = at::kBFloat16;
  if (tensor.code->values > 1) stored.code = tensor.code;
  const auto strides = c10::contiguous_strides(tensor.sizes);
  stored.boxes.push_back({.box = whole_slice(tensor.sizes), .offset = tensor.offset, .strides = {strides.begin(), strides.end()}});
  return stored;
}

int64_t heads_in_pairs(const GgufFile& file, const std::string& name) {
  const auto architecture = file.architecture();
  const auto heads = file.integer(architecture + ".attention.head_count").value_or(0);
  return checkpoint::heads_in_pairs(architecture, name, heads, file.integer(architecture + ".attention.head_count_kv").value_or(heads));
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path) : path_(path) {
  const InputFile file(path);
  HeaderReader header(file);
  if (!has_magic(file)) throw IoError("{} is not a GGUF file", path);
  header.number<uint32_t>();
  const auto version = header.number<uint32_t>();
  if (version < kOldestGgufVersion || version > kGgufVersion)
    throw IoError("{} is a GGUF file of version {}; this program reads versions {} and {}", path, version, kOldestGgufVersion,
                  kGgufVersion);
  const auto tensors = header.number<uint64_t>(), keys = header.number<uint64_t>();
  std::set<std::string> known;
  for (uint64_t i = 0; i < keys; i++) {
    auto key = header.text("the name of a key");
    if (!known.insert(key).second) header.refuse("the key '{}' occurs twice", key);
    auto value = header.value(key);
    metadata_.emplace_back(std::move(key), std::move(value));
  }
  known.clear();
  for (uint64_t i = 0; i < tensors; i++) {
    tensors_.push_back(read_tensor(header));
    if (!known.insert(tensors_.back().name).second) header.refuse("the tensor '{}' occurs twice", tensors_.back().name);
  }
  if (tensors_.empty()) return;
  const auto alignment = static_cast<uint64_t>(integer(kAlignmentKey).value_or(kGgufAlignment));
  if (alignment == 0 || alignment > file.size()) header.refuse("{} is {}", kAlignmentKey, alignment);
  const auto begin = aligned(header.at(), alignment);
  for (auto& tensor : tensors_) {
    if (__builtin_add_overflow(tensor.offset, begin, &tensor.offset)) header.refuse("the offset of '{}' is too large", tensor.name);
    expect_sound(header, tensor, file.size());
  }
}

const GgufValue* GgufFile::find(const std::string& key) const {
  const auto found = std::ranges::find(metadata_, key, [](const auto& entry) { return std::string_view(entry.first); });
  return found == metadata_.end() ? nullptr : &found->second;
}

template <class T>
const T* GgufFile::get(const std::string& key) const {
  const auto* value = find(key);
  if (value == nullptr) return nullptr;
  const auto* data = std::get_if<T>(&value->data);
  if (data == nullptr) throw IoError("{}: the metadata '{}' has the wrong type", path_, key);
  return data;
}

/// Copies a value that may be missing (null).
template <class T>
static std::optional<T> copy_of_found(const T* value) {
  return value == nullptr ? std::nullopt : std::optional(*value);
}

std::optional<int64_t> GgufFile::integer(const std::string& key) const {
  return copy_of_found(get<int64_t>(key));
}

std::optional<double> GgufFile::number(const std::string& key) const {
  return copy_of_found(get<double>(key));
}

std::optional<std::string> GgufFile::text(const std::string& key) const {
  return copy_of_found(get<std::string>(key));
}

const std::vector<std::string>* GgufFile::texts(const std::string& key) const {
  return get<std::vector<std::string>>(key);
}
const std::vector<int64_t>* GgufFile::integers(const std::string& key) const {
  return get<std::vector<int64_t>>(key);
}
const std::vector<double>* GgufFile::numbers(const std::string& key) const {
  return get<std::vector<double>>(key);
}

std::string GgufFile::architecture() const {
  const auto name = text(kArchitectureKey);
  if (!name) throw IoError("{} has no {}", path_, kArchitectureKey);
  return *name;
}

bool is_gguf_file(const std::filesystem::path& path) {
  return has_magic(InputFile(path));
}

Catalog read_gguf(const GgufFile& file) {
  const auto& path = file.path();
  const auto architecture = file.text(kArchitectureKey).value_or("");
  Catalog catalog{.files = {path}};
  const auto add = [&](const std::string& name, StoredTensor stored) {
    if (!catalog.tensors.emplace(name, std::move(stored)).second) throw IoError("{}: two tensors have the name '{}'", path, name);
  };
  for (const auto& tensor : file.tensors()) {
    const auto name = name_of_gguf(architecture, tensor.name).value_or(tensor.name);
    if (name == kRopeFactors || name == kLongFactors || name == kShortFactors) {
      catalog.left_out[name] = "the model's configuration says which factors its rotary embeddings have";
      continue;
    }
    if (const auto number = number_of_expert(name); number && tensor.sizes.size() == 3) {
      auto one = tensor;
      one.sizes.erase(one.sizes.begin());
      const auto bytes = c10::multiply_integers(one.sizes) / one.code->values * one.code->bytes;
      for (int64_t expert = 0; expert < tensor.sizes[0]; expert++, one.offset += static_cast<uint64_t>(bytes))
        add(std::string(name).replace(number->first, number->second, std::to_string(expert)), stored_of(one));
      continue;
    }
    if (name.ends_with("shared_expert_gate.weight") && tensor.sizes.size() == 1) {  // a matrix of one row in Hugging Face's files
      auto row = tensor;
      row.sizes.insert(row.sizes.begin(), 1);
      add(name, stored_of(row));
      continue;
    }
    auto stored = stored_of(tensor);
    if (has_one_added(architecture, name)) {
      if (stored.dtype != at::kFloat || stored.code != nullptr)
        throw IoError("{}: '{}' is {}, but norms of {} are read as F32 only", path, tensor.name, tensor.code->name, architecture);
      stored.code = &kLessOne;
    }
    const auto heads = heads_in_pairs(file, name);
    if (heads > 0) {
      const auto rows = tensor.sizes.empty() ? 0 : tensor.sizes[0];
      if (heads > rows || rows % (2 * heads) != 0 || tensor.sizes.back() < 1)
        throw IoError("{}: the rows of '{}' can't be divided evenly among {} heads", path, tensor.name, heads);
      stored.boxes = boxes_of_pairs(tensor, heads);
    }
    add(name, std::move(stored));
  }
  return catalog;
}

at::Tensor read_gguf_tensor(const GgufFile& file, const std::string& name) {
  const auto found = std::ranges::find(file.tensors(), name, &GgufTensor::name);
  if (found == file.tensors().end()) return {};
  Catalog catalog{.files = {file.path()}};
  catalog.tensors.emplace(name, stored_of(*found));
  return CatalogReader(std::move(catalog)).read(name);
}

}  // namespace tessera::checkpoint
