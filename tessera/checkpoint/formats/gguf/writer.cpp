// Writes GGUF files, whose matrices are encoded in blocks.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/gguf/parts.h"

namespace tessera::checkpoint {
namespace {

constexpr int64_t kValuesAtOnce = 1 << 16;

/// Builds the header of a file.
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
  void magic() { bytes_.append(kGgufMagic, sizeof kGgufMagic); }

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

}  // namespace

int64_t heads_in_pairs(std::string_view architecture, std::string_view name, int64_t heads, int64_t key_value_heads) {
  if (architecture != "llama" && architecture != "smollm3") return 0;
  const auto is_of = [&](std::string_view projection) { return name.find(projection) != std::string_view::npos; };
  return is_of(".self_attn.q_proj.") ? heads : is_of(".self_attn.k_proj.") ? key_value_heads : 0;
}

bool has_one_added(std::string_view architecture, std::string_view name) {
  return architecture.starts_with("gemma") && name.ends_with("norm.weight");
}

at::Tensor rows_for_gguf(const at::Tensor& weight, int64_t heads) {
  return weight.unflatten(0, {heads, 2, -1}).transpose(1, 2).flatten(0, 2).contiguous();
}

at::Tensor rows_of_gguf(const at::Tensor& weight, int64_t heads) {
  return weight.unflatten(0, {heads, -1, 2}).transpose(1, 2).flatten(0, 2).contiguous();
}

/// Throws UsageError if values are too large for a code whose values or block scales have 16 bits. Allows infinite values and NaNs for
/// bfloat16.
static void expect_in_half(const at::Tensor& values, const GgufTensor& entry) {
  constexpr double kMostOfHalf = 65504, kMostOfBfloat = 3.3895313892515355e38;
  const bool is_bfloat = entry.code->name == "BF16";
  const auto sizes = values.abs();
  const auto most = (is_bfloat ? sizes.masked_fill(values.isfinite().logical_not(), 0) : sizes).max().item<double>();
  if (!(most <= (is_bfloat ? kMostOfBfloat : kMostOfHalf)))
    throw UsageError("'{}' has values up to {}, which {} can't hold; write {}", entry.name, most, entry.code->name,
                     is_bfloat ? "F32" : "BF16 or F32");
}

GgufWriter::GgufWriter(const std::filesystem::path& path, const GgufMetadata& metadata, std::vector<GgufTensor> tensors)
    : tensors_(std::move(tensors)), file_(path) {
  HeaderWriter header;
  header.magic();
  header.number(kGgufVersion);
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
      throw UsageError("'{}' with rows of {} values can't be written as {}", tensor.name, row, tensor.code->name);
    header.text(tensor.name);
    header.number(static_cast<uint32_t>(tensor.sizes.size()));
    for (auto size = tensor.sizes.rbegin(); size != tensor.sizes.rend(); ++size) header.number(static_cast<uint64_t>(*size));
    header.number(tensor.code->number);
    header.number(offset);
    tensor.offset = offset;
    offset = aligned(offset + static_cast<uint64_t>(c10::multiply_integers(tensor.sizes) / tensor.code->values * tensor.code->bytes),
                     kGgufAlignment);
  }
  auto& bytes = header.bytes();
  bytes.resize(aligned(bytes.size(), kGgufAlignment));
  file_.write(std::as_bytes(std::span(bytes)));
}

void GgufWriter::pad_to(uint64_t offset) {
  const std::vector<std::byte> zeros(offset - written_);
  file_.write(zeros);
  written_ = offset;
}

void GgufWriter::write(const at::Tensor& tensor) {
  const auto& entry = tensors_.at(next_++);
  if (tensor.sizes() != at::IntArrayRef(entry.sizes)) throw UsageError("'{}' has other sizes than its entry", entry.name);
  pad_to(entry.offset);
  const auto flat = tensor.detach().contiguous().view(-1);
  const auto& code = *entry.code;
  const bool is_half = code.name != "F32";  // whether its values or scales have 16 bits
  std::vector<uint8_t> bytes;
  for (int64_t begin = 0; begin < flat.numel(); begin += kValuesAtOnce) {
    const auto part = flat.narrow(0, begin, std::min(kValuesAtOnce, flat.numel() - begin)).to(at::kFloat);
    if (is_half) expect_in_half(part, entry);
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
  if (next_ != tensors_.size()) throw UsageError("only {} of {} tensors were written before close()", next_, tensors_.size());
  pad_to(aligned(written_, kGgufAlignment));
  file_.commit();
}

}  // namespace tessera::checkpoint
