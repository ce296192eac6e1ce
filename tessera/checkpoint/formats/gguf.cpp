#include "tessera/checkpoint/formats/gguf.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "the file is little-endian, and so are we");
constexpr char kMagic[] = {'G', 'G', 'U', 'F'};
constexpr uint32_t kVersion = 3, kOldestVersion = 2;  // which differ in nothing for little-endian machines
constexpr uint64_t kAlignment = 32, kMostDims = 4;
constexpr auto kAlignmentKey = "general.alignment", kArchitectureKey = "general.architecture";
constexpr int64_t kValuesAtOnce = 1 << 16;

uint64_t aligned(uint64_t offset, uint64_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

/// The bytes of a number of that type; 0 for those that are no numbers.
uint64_t width_of(GgufType type) {
  using enum GgufType;
  switch (type) {
    case U8:
    case I8:
    case Bool:
      return 1;
    case U16:
    case I16:
      return 2;
    case U32:
    case I32:
    case F32:
      return 4;
    case U64:
    case I64:
    case F64:
      return 8;
    case Text:
    case Array:
      return 0;
  }
  return 0;
}

bool is_real(GgufType type) {
  return type == GgufType::F32 || type == GgufType::F64;
}

/// Calls act with a number of the C++ type of `type`.
void with_number(GgufType type, const auto& act) {
  using enum GgufType;
  switch (type) {
    case U8:
    case Bool:
      return act(uint8_t());
    case I8:
      return act(int8_t());
    case U16:
      return act(uint16_t());
    case I16:
      return act(int16_t());
    case U32:
      return act(uint32_t());
    case I32:
      return act(int32_t());
    case F32:
      return act(float());
    case U64:
      return act(uint64_t());
    case I64:
      return act(int64_t());
    default:
      return act(double());
  }
}

/// Reads a header from its beginning to its end.
class HeaderReader {
 public:
  explicit HeaderReader(const InputFile& file) : file_(file) {}

  uint64_t at() const { return at_; }
  uint64_t left() const { return file_.size() - at_; }
  [[noreturn]] void refuse(const std::string& why) const {
    throw IoError(fmt::format("{} is damaged or cut off: {}", file_.path().string(), why));
  }

  template <class T>
  T number() {
    T value;
    take(&value, sizeof value);
    return value;
  }

  std::string text(const std::string& what) {
    const auto length = number<uint64_t>();
    if (length > left()) refuse(fmt::format("{} should have {} bytes, but {} are left", what, length, left()));
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
    if (of == GgufType::Array) refuse(fmt::format("'{}' is a list of lists", key));
    if (count > left() / least) refuse(fmt::format("'{}' should have {} elements, but {} bytes are left", key, count, left()));
    if (of == GgufType::Text) return {of, list<std::string>(count, [&] { return text(key); })};
    if (is_real(of)) return {of, list<double>(count, [&] { return std::get<double>(single(of, key).data); })};
    return {of, list<int64_t>(count, [&] { return std::get<int64_t>(single(of, key).data); })};
  }

 private:
  GgufType type_of(uint32_t number, const std::string& key) const {
    if (number > static_cast<uint32_t>(GgufType::F64)) refuse(fmt::format("'{}' has the type {}, which does not exist", key, number));
    return static_cast<GgufType>(number);
  }

  GgufValue single(GgufType type, const std::string& key) {
    if (type == GgufType::Text) return {type, text(key)};
    GgufValue result{.type = type};
    with_number(type, [&]<class T>(T) {
      const auto read = number<T>();
      if constexpr (std::is_same_v<T, uint64_t>) {
        if (!std::in_range<int64_t>(read)) refuse(fmt::format("'{}' is {}, which is too large", key, read));
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
    values.reserve(count);
    for (uint64_t i = 0; i < count; i++) values.push_back(next());
    return values;
  }

  void take(void* to, uint64_t count) {
    if (count > left()) refuse(fmt::format("its header goes on behind its end at byte {}", file_.size()));
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
  if (dims > kMostDims) header.refuse(fmt::format("'{}' has {} dimensions", tensor.name, dims));
  for (uint32_t d = 0; d < dims; d++) {
    const auto size = header.number<uint64_t>();
    if (!std::in_range<int64_t>(size)) header.refuse(fmt::format("'{}' has a dimension of {}", tensor.name, size));
    tensor.sizes.insert(tensor.sizes.begin(), static_cast<int64_t>(size));
  }
  const auto number = header.number<uint32_t>();
  tensor.code = find_block_code(number);
  if (tensor.code == nullptr) {
    std::vector<std::string_view> names;
    for (const auto& code : block_codes()) names.push_back(code.name);
    header.refuse(fmt::format("'{}' has the code number {} of ggml, which is not read here; those that are: {}", tensor.name, number,
                              fmt::join(names, ", ")));
  }
  tensor.offset = header.number<uint64_t>();
  return tensor;
}

/// The values of a tensor, whose rows are whole blocks that lie in the file.
void expect_sound(const HeaderReader& header, const GgufTensor& tensor, uint64_t size_of_file) {
  int64_t values = 1;
  for (const auto size : tensor.sizes) {
    if (__builtin_mul_overflow(values, size, &values)) header.refuse(fmt::format("'{}' has no size", tensor.name));
  }
  const auto row = tensor.sizes.empty() ? 1 : tensor.sizes.back();
  if (row % tensor.code->values != 0)
    header.refuse(fmt::format("'{}' has rows of {} values, which are no whole blocks of {}", tensor.name, row, tensor.code->values));
  uint64_t bytes = 0, end = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(values / tensor.code->values), static_cast<uint64_t>(tensor.code->bytes), &bytes) ||
      __builtin_add_overflow(bytes, tensor.offset, &end) || end > size_of_file) {
    header.refuse(fmt::format("'{}' lies behind the end of the file, which has {} bytes", tensor.name, size_of_file));
  }
}

/// Header of a file that is written.
class HeaderWriter {
 public:
  template <class T>
  void number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(const std::string& value) {
    number<uint64_t>(value.size());
    bytes_ += value;
  }
  void magic() { bytes_.append(kMagic, sizeof kMagic); }

  void value(const GgufValue& value) {
    std::visit(
        [&]<class T>(const T& data) {
          if constexpr (std::is_same_v<T, std::string> || std::is_arithmetic_v<T>) {
            number(static_cast<uint32_t>(value.type));
            element(value.type, data);
          } else {
            number(static_cast<uint32_t>(GgufType::Array));
            number(static_cast<uint32_t>(value.type));
            number<uint64_t>(data.size());
            for (const auto& each : data) element(value.type, each);
          }
        },
        value.data);
  }

  std::string& bytes() { return bytes_; }

 private:
  void element(GgufType /*type*/, const std::string& value) { text(value); }
  void element(GgufType type, auto value) {
    with_number(type, [&]<class T>(T) { number(static_cast<T>(value)); });
  }

  std::string bytes_;
};

struct NamePair {
  std::string_view gguf, hub;
};
constexpr NamePair kOfModel[] = {{"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}};
constexpr NamePair kOfLayers[] = {{"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
                                  {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
                                  {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
                                  {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
                                  {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
                                  {"ffn_down", "mlp.down_proj"}};
constexpr std::string_view kLayer = "blk.", kHubLayer = "model.layers.";

/// "blk.3.attn_q.weight" in parts: what comes before the stem, the stem, and ".weight" or ".bias".
std::optional<std::string> translated(std::string_view name, std::string_view NamePair::* from, std::string_view NamePair::* to,
                                      std::string_view layer_from, std::string_view layer_to) {
  const auto dot = name.rfind('.');
  if (dot == std::string_view::npos) return {};
  const auto stem = name.substr(0, dot), end = name.substr(dot);
  const auto find = [&](const auto& table, std::string_view wanted) -> const NamePair* {
    const auto* const found = std::ranges::find(table, wanted, from);
    return found == std::end(table) ? nullptr : found;
  };
  if (!stem.starts_with(layer_from)) {
    const auto* pair = find(kOfModel, stem);
    return pair == nullptr ? std::nullopt : std::optional(fmt::format("{}{}", pair->*to, end));
  }
  const auto rest = stem.substr(layer_from.size());
  const auto digits = rest.find_first_not_of("0123456789");
  if (digits == std::string_view::npos || digits == 0 || rest[digits] != '.') return {};
  const auto* pair = find(kOfLayers, rest.substr(digits + 1));
  if (pair == nullptr) return {};
  return fmt::format("{}{}.{}{}", layer_to, rest.substr(0, digits), pair->*to, end);
}

/// The rows of a head lie in pairs; Hugging Face has all first ones, and then all second ones.
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

StoredTensor stored_of(const GgufTensor& tensor) {
  StoredTensor stored{.dtype = at::kFloat, .shape = tensor.sizes};
  if (tensor.code->name == "F16") stored.dtype = at::kHalf;
  if (tensor.code->name == "BF16") stored.dtype = at::kBFloat16;
  if (tensor.code->values > 1) stored.code = tensor.code;
  const auto strides = c10::contiguous_strides(tensor.sizes);
  stored.boxes.push_back({.box = whole_slice(tensor.sizes), .offset = tensor.offset, .strides = {strides.begin(), strides.end()}});
  return stored;
}

/// How many heads' rows are in pairs in this tensor; 0 if none are.
int64_t heads_in_pairs(const GgufFile& file, const std::string& name) {
  if (file.architecture() != "llama") return 0;
  const auto heads = file.integer("llama.attention.head_count").value_or(0);
  if (name.find(".self_attn.q_proj.") != std::string::npos) return heads;
  if (name.find(".self_attn.k_proj.") != std::string::npos) return file.integer("llama.attention.head_count_kv").value_or(heads);
  return 0;
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path) : path_(path) {
  const InputFile file(path);
  HeaderReader header(file);
  char magic[sizeof kMagic] = {};
  if (file.size() >= sizeof magic) file.read(magic, sizeof magic, 0);
  if (!std::ranges::equal(magic, kMagic)) throw IoError(fmt::format("{} is no GGUF file", path.string()));
  header.number<uint32_t>();
  const auto version = header.number<uint32_t>();
  if (version < kOldestVersion || version > kVersion)
    throw IoError(fmt::format("{} is a GGUF file of version {}; this program reads versions {} and {}", path.string(), version,
                              kOldestVersion, kVersion));
  const auto tensors = header.number<uint64_t>(), keys = header.number<uint64_t>();
  std::set<std::string> known;
  for (uint64_t i = 0; i < keys; i++) {
    auto key = header.text("the name of a key");
    if (!known.insert(key).second) header.refuse(fmt::format("'{}' is there twice", key));
    auto value = header.value(key);
    metadata_.emplace_back(std::move(key), std::move(value));
  }
  known.clear();
  for (uint64_t i = 0; i < tensors; i++) {
    tensors_.push_back(read_tensor(header));
    if (!known.insert(tensors_.back().name).second) header.refuse(fmt::format("the tensor '{}' is there twice", tensors_.back().name));
  }
  const auto alignment = static_cast<uint64_t>(integer(kAlignmentKey).value_or(kAlignment));
  if (alignment == 0 || alignment > file.size()) header.refuse(fmt::format("{} is {}", kAlignmentKey, alignment));
  const auto begin = aligned(header.at(), alignment);
  for (auto& tensor : tensors_) {
    if (__builtin_add_overflow(tensor.offset, begin, &tensor.offset)) header.refuse(fmt::format("'{}' lies nowhere", tensor.name));
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
  if (data == nullptr) throw IoError(fmt::format("{}: '{}' has another type than it should", path_.string(), key));
  return data;
}

std::optional<int64_t> GgufFile::integer(const std::string& key) const {
  const auto* value = get<int64_t>(key);
  return value == nullptr ? std::nullopt : std::optional(*value);
}

std::optional<double> GgufFile::number(const std::string& key) const {
  const auto* value = get<double>(key);
  return value == nullptr ? std::nullopt : std::optional(*value);
}

std::optional<std::string> GgufFile::text(const std::string& key) const {
  const auto* value = get<std::string>(key);
  return value == nullptr ? std::nullopt : std::optional(*value);
}

const std::vector<std::string>* GgufFile::texts(const std::string& key) const {
  return get<std::vector<std::string>>(key);
}
const std::vector<int64_t>* GgufFile::integers(const std::string& key) const {
  return get<std::vector<int64_t>>(key);
}

std::string GgufFile::architecture() const {
  const auto name = text(kArchitectureKey);
  if (!name) throw IoError(fmt::format("{} has no {}", path_.string(), kArchitectureKey));
  return *name;
}

bool is_gguf_file(const std::filesystem::path& path) {
  const InputFile file(path);
  char magic[sizeof kMagic] = {};
  if (file.size() < sizeof magic) return false;
  file.read(magic, sizeof magic, 0);
  return std::ranges::equal(magic, kMagic);
}

Catalog read_gguf(const std::filesystem::path& path) {
  const GgufFile file(path);
  Catalog catalog{.files = {path}};
  for (const auto& tensor : file.tensors()) {
    const auto name = name_of_gguf(tensor.name).value_or(tensor.name);
    if (name == kRopeFactors) {
      catalog.left_out[name] = "they are part of the model's shape";
      continue;
    }
    auto stored = stored_of(tensor);
    const auto heads = heads_in_pairs(file, name);
    if (heads > 0) {
      if (tensor.sizes.empty() || tensor.sizes[0] % (2 * heads) != 0)
        throw IoError(fmt::format("{}: the rows of '{}' don't fall into {} heads", path.string(), tensor.name, heads));
      stored.boxes = boxes_of_pairs(tensor, heads);
    }
    if (!catalog.tensors.emplace(name, std::move(stored)).second)
      throw IoError(fmt::format("{}: two tensors are '{}'", path.string(), name));
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

std::optional<std::string> gguf_name(const std::string& name) {
  return translated(name, &NamePair::hub, &NamePair::gguf, kHubLayer, kLayer);
}
std::optional<std::string> name_of_gguf(const std::string& gguf) {
  return translated(gguf, &NamePair::gguf, &NamePair::hub, kLayer, kHubLayer);
}

at::Tensor rows_for_gguf(const at::Tensor& weight, int64_t heads) {
  return weight.unflatten(0, {heads, 2, -1}).transpose(1, 2).flatten(0, 2).contiguous();
}

GgufWriter::GgufWriter(const std::filesystem::path& path, const GgufMetadata& metadata, std::vector<GgufTensor> tensors)
    : tensors_(std::move(tensors)), file_(path) {
  HeaderWriter header;
  header.magic();
  header.number(kVersion);
  header.number<uint64_t>(tensors_.size());
  header.number<uint64_t>(metadata.size());
  for (const auto& [key, value] : metadata) {
    header.text(key);
    header.value(value);
  }
  uint64_t offset = 0;
  for (auto& tensor : tensors_) {
    const auto row = tensor.sizes.empty() ? 1 : tensor.sizes.back();
    if (row % tensor.code->values != 0 || tensor.code->encode == nullptr)
      throw UsageError(fmt::format("'{}' with rows of {} values can't be written as {}", tensor.name, row, tensor.code->name));
    header.text(tensor.name);
    header.number(static_cast<uint32_t>(tensor.sizes.size()));
    for (auto size = tensor.sizes.rbegin(); size != tensor.sizes.rend(); ++size) header.number(static_cast<uint64_t>(*size));
    header.number(tensor.code->number);
    header.number(offset);
    tensor.offset = offset;
    offset = aligned(offset + static_cast<uint64_t>(c10::multiply_integers(tensor.sizes) / tensor.code->values * tensor.code->bytes),
                     kAlignment);
  }
  auto& bytes = header.bytes();
  bytes.resize(aligned(bytes.size(), kAlignment));
  file_.write(std::as_bytes(std::span(bytes)));
}

void GgufWriter::pad_to(uint64_t offset) {
  const std::vector<std::byte> zeros(offset - written_);
  file_.write(zeros);
  written_ = offset;
}

void GgufWriter::write(const at::Tensor& tensor) {
  const auto& entry = tensors_.at(next_++);
  if (tensor.sizes() != at::IntArrayRef(entry.sizes)) throw UsageError(fmt::format("'{}' has other sizes than its entry", entry.name));
  pad_to(entry.offset);
  const auto flat = tensor.detach().contiguous().view(-1);
  const auto& code = *entry.code;
  std::vector<uint8_t> bytes;
  for (int64_t begin = 0; begin < flat.numel(); begin += kValuesAtOnce) {
    const auto part = flat.narrow(0, begin, std::min(kValuesAtOnce, flat.numel() - begin)).to(at::kFloat);
    const auto blocks = part.numel() / code.values;
    bytes.resize(static_cast<size_t>(blocks * code.bytes));
    const auto* values = part.const_data_ptr<float>();
    at::parallel_for(0, blocks, 1024, [&](int64_t first, int64_t last) {
      for (auto i = first; i < last; i++) code.encode(values + i * code.values, bytes.data() + i * code.bytes);
    });
    file_.write(std::as_bytes(std::span(bytes)));
    written_ += bytes.size();
  }
}

void GgufWriter::close() {
  if (next_ != tensors_.size()) throw UsageError(fmt::format("{} of {} tensors were written", next_, tensors_.size()));
  pad_to(aligned(written_, kAlignment));
  file_.commit();
}

}  // namespace tessera::checkpoint
