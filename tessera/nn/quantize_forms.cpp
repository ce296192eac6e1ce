#include "tessera/nn/quantize_forms.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Float8_e4m3fn.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "tessera/base/dynamic_code.h"
#include "tessera/base/error.h"
#include "tessera/nn/quantize_kernels.h"

namespace tessera::nn {
namespace {

/// A form is a sequence of blocks, each of which has all that its values need. Values that the last block lacks count as 0.
struct Form {
  std::string_view name;
  int64_t values;  // of a block
  int64_t bytes;
  void (*encode)(const at::Tensor& values, const at::Tensor& held);
  /// `scales`: room for one scale for each 64 values of a block.
  void (*decode)(const uint8_t* block, int64_t count, float* scales, float* values);
  void (*decode_bfloats)(const uint8_t* block, int64_t count, float* scales, uint16_t* values);
  /// The values of all blocks and the scales of each 64 of them, by operators, for devices.
  std::pair<at::Tensor, at::Tensor> (*decode_by_operators)(const at::Tensor& held);
};

constexpr int64_t kNested = DynamicCode::kBlock;            // scales that share a scale
constexpr int64_t kNf4Values = kNested * kQuantBlock;       // values in a block of NF4
constexpr int64_t kNf4Codes = kNf4Values / 2;               // the bytes of their codes
constexpr int64_t kNf4Bytes = kNf4Codes + kNested + 2 * 4;  // with a byte per scale, and the scale and the mean of the scales
constexpr int64_t kGrain = 16384;                           // values

float float_at(const uint8_t* bytes) {
  float value = 0;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

void put(float value, uint8_t* bytes) {
  std::memcpy(bytes, &value, sizeof value);
}

/// Calls `act(block, begin, count)` for blocks of `values` values, on several threads.
template <class Act>
void for_blocks(int64_t numel, int64_t values, const Act& act) {
  const auto blocks = (numel + values - 1) / values;
  at::parallel_for(0, blocks, std::max<int64_t>(kGrain / values, 1), [&](int64_t first, int64_t end) {
    for (auto block = first; block < end; block++) act(block, block * values, std::min(values, numel - block * values));
  });
}

void encode_nf4(const at::Tensor& values, const at::Tensor& held) {
  const auto numel = values.numel();
  const auto* const from = values.const_data_ptr<float>();
  auto* const to = held.mutable_data_ptr<uint8_t>();
  const auto largest_of = at::empty({(numel + kQuantBlock - 1) / kQuantBlock}, at::kFloat);
  auto* const scales = largest_of.mutable_data_ptr<float>();
  for_blocks(numel, kQuantBlock, [&](int64_t block, int64_t begin, int64_t count) { scales[block] = largest(from + begin, count); });
  const auto mean = largest_of.mean().item<float>();
  for_blocks(numel, kNf4Values, [&](int64_t block, int64_t begin, int64_t count) {
    auto* const bytes = to + block * kNf4Bytes;
    float differences[kNested];
    int64_t here = 0;
    for (int64_t done = 0; done < count; done += kQuantBlock, here++) {
      const float scale = scales[block * kNested + here];
      nf4_codes(from + begin + done, std::min(kQuantBlock, count - done), scale, bytes + done / 2);
      differences[here] = scale - mean;
    }
    put(DynamicCode::of_signed().encode(std::span(differences, static_cast<size_t>(here)), bytes + kNf4Codes), bytes + kNf4Codes + kNested);
    put(mean, bytes + kNf4Codes + kNested + 4);
  });
}

template <class Out>
void decode_nf4(const uint8_t* block, int64_t count, float* scales, Out* values) {
  const auto& code = DynamicCode::of_signed();
  const auto *const codes = block + kNf4Codes, *const behind = codes + kNested;
  const float nested = float_at(behind), mean = float_at(behind + 4);
  for (int64_t i = 0; i * kQuantBlock < count; i++) {
    const float difference = code.value(codes[i]) * nested;
    scales[i] = difference + mean;
  }
  nf4_values(block, scales, count, values);
}

void encode_nf4_single(const at::Tensor& values, const at::Tensor& held) {
  const auto* const from = values.const_data_ptr<float>();
  auto* const to = held.mutable_data_ptr<uint8_t>();
  for_blocks(values.numel(), kQuantBlock, [&](int64_t block, int64_t begin, int64_t count) {
    const float scale = largest(from + begin, count);
    auto* const bytes = to + block * held.size(1);
    nf4_codes(from + begin, count, scale, bytes);
    put(scale, bytes + kQuantBlock / 2);
  });
}

template <class Out>
void decode_nf4_single(const uint8_t* block, int64_t count, float* scales, Out* values) {
  scales[0] = float_at(block + kQuantBlock / 2);
  nf4_values(block, scales, count, values);
}

/// Encodes blocks of a byte for each value, followed by a scale for each 64. `code` gets values divided by the scale, at most `most`.
template <class Code>
void encode_bytes(const at::Tensor& values, const at::Tensor& held, int64_t of_block, float most, const Code& code) {
  const auto* const from = values.const_data_ptr<float>();
  auto* const to = held.mutable_data_ptr<uint8_t>();
  for_blocks(values.numel(), kQuantBlock, [&](int64_t number, int64_t begin, int64_t count) {
    const float scale = largest(from + begin, count) / most;
    auto* const block = to + begin / of_block * held.size(1);
    auto* const bytes = block + begin % of_block;
    for (int64_t i = 0; i < count; i++) bytes[i] = scale == 0 ? 0 : code(from[begin + i] / scale);
    put(scale, block + of_block + number % (of_block / kQuantBlock) * 4);
  });
}

constexpr float kMostInt8 = 127, kMostFp8 = 448;
constexpr int64_t kFp8Values = 2 * kQuantBlock;  // so that the shape differs from int8's, and the two are never confused

void encode_int8(const at::Tensor& values, const at::Tensor& held) {
  encode_bytes(values, held, kQuantBlock, kMostInt8, [](float share) {
    return static_cast<uint8_t>(static_cast<int8_t>(std::clamp(std::nearbyint(share), -kMostInt8, kMostInt8)));
  });
}

void encode_fp8(const at::Tensor& values, const at::Tensor& held) {
  encode_bytes(values, held, kFp8Values, kMostFp8,
               [](float share) { return c10::Float8_e4m3fn(std::clamp(share, -kMostFp8, kMostFp8)).x; });
}

template <class Of>
std::array<float, 256> values_of_bytes(const Of& of) {
  std::array<float, 256> values = {};
  for (size_t byte = 0; byte < values.size(); byte++) values[byte] = of(static_cast<uint8_t>(byte));
  return values;
}

template <class Out>
void decode_int8(const uint8_t* block, int64_t count, float* scales, Out* values) {
  static const auto of_code = values_of_bytes([](uint8_t byte) { return static_cast<float>(static_cast<int8_t>(byte)); });
  scales[0] = float_at(block + kQuantBlock);
  byte_values(block, of_code.data(), scales, count, values);
}

const std::array<float, 256>& fp8_values() {
  static const auto of_code =
      values_of_bytes([](uint8_t byte) { return static_cast<float>(c10::Float8_e4m3fn(byte, c10::Float8_e4m3fn::from_bits())); });
  return of_code;
}

template <class Out>
void decode_fp8(const uint8_t* block, int64_t count, float* scales, Out* values) {
  for (int64_t i = 0; i * kQuantBlock < count; i++) scales[i] = float_at(block + kFp8Values + i * 4);
  byte_values(block, fp8_values().data(), scales, count, values);
}

at::Tensor looked_up(std::span<const float> table, const at::Tensor& codes) {
  const auto values = at::tensor(std::vector<float>(table.begin(), table.end())).to(codes.device());
  return values.index_select(0, codes.flatten().to(at::kInt)).view(codes.sizes());
}

/// The floats at the end of each block.
at::Tensor last_floats(const at::Tensor& held, int64_t count) {
  return held.narrow(1, held.size(1) - 4 * count, 4 * count).contiguous().view(at::kFloat);
}

at::Tensor nf4_by_operators(const at::Tensor& codes) {
  return looked_up(kNf4, at::stack({codes.bitwise_right_shift(4), codes.bitwise_and(15)}, -1));
}

std::pair<at::Tensor, at::Tensor> nf4_pieces(const at::Tensor& held) {
  const auto nested_and_mean = last_floats(held, 2);
  const auto scales = looked_up(DynamicCode::of_signed().values(), held.narrow(1, kNf4Codes, kNested));
  return {nf4_by_operators(held.narrow(1, 0, kNf4Codes)), scales * nested_and_mean.narrow(1, 0, 1) + nested_and_mean.narrow(1, 1, 1)};
}

std::pair<at::Tensor, at::Tensor> nf4_single_pieces(const at::Tensor& held) {
  return {nf4_by_operators(held.narrow(1, 0, kQuantBlock / 2)), last_floats(held, 1)};
}

std::pair<at::Tensor, at::Tensor> int8_pieces(const at::Tensor& held) {
  return {held.narrow(1, 0, kQuantBlock).contiguous().view(at::kChar), last_floats(held, 1)};
}

std::pair<at::Tensor, at::Tensor> fp8_pieces(const at::Tensor& held) {
  return {looked_up(fp8_values(), held.narrow(1, 0, kFp8Values)), last_floats(held, kFp8Values / kQuantBlock)};
}

constexpr Form kForms[] = {
    {"nf4", kNf4Values, kNf4Bytes, encode_nf4, decode_nf4<float>, decode_nf4<uint16_t>, nf4_pieces},
    {"nf4_single", kQuantBlock, kQuantBlock / 2 + 4, encode_nf4_single, decode_nf4_single<float>, decode_nf4_single<uint16_t>,
     nf4_single_pieces},
    {"int8", kQuantBlock, kQuantBlock + 4, encode_int8, decode_int8<float>, decode_int8<uint16_t>, int8_pieces},
    {"fp8", kFp8Values, kFp8Values + 8, encode_fp8, decode_fp8<float>, decode_fp8<uint16_t>, fp8_pieces},
};

const Form& form_of(int64_t quantization) {
  return kForms[static_cast<size_t>(quantization)];
}

std::vector<int64_t> held_sizes(const Form& form, int64_t numel) {
  return {(numel + form.values - 1) / form.values, form.bytes};
}

at::Tensor encode_on_cpu(const at::Tensor& values, int64_t quantization) {
  const auto& form = form_of(quantization);
  const auto flat = values.to(at::kFloat).contiguous().view({-1});
  if (!flat.isfinite().all().item<bool>())
    throw UsageError("a weight of [{}] can't be quantised: it has values that are NaN or infinite", joined(values.sizes()));
  auto held = at::zeros(held_sizes(form, flat.numel()), at::kByte);
  form.encode(flat, held);
  return held;
}

at::Tensor encode_on_meta(const at::Tensor& values, int64_t quantization) {
  return at::empty(held_sizes(form_of(quantization), values.numel()), values.options().dtype(at::kByte));
}

at::Tensor decode_on_cpu(const at::Tensor& held, int64_t quantization, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto& form = form_of(quantization);
  const bool is_bfloat = dtype == at::kBFloat16;
  const auto values = at::empty(sizes, is_bfloat ? dtype : at::kFloat);
  const auto rows = held.contiguous();
  const auto* const bytes = rows.const_data_ptr<uint8_t>();
  auto* const floats = is_bfloat ? nullptr : values.mutable_data_ptr<float>();
  auto* const bfloats = is_bfloat ? reinterpret_cast<uint16_t*>(values.mutable_data_ptr<at::BFloat16>()) : nullptr;
  for_blocks(values.numel(), form.values, [&](int64_t block, int64_t begin, int64_t count) {
    float scales[kNested];
    const auto* const from = bytes + block * form.bytes;
    is_bfloat ? form.decode_bfloats(from, count, scales, bfloats + begin) : form.decode(from, count, scales, floats + begin);
  });
  return values.to(dtype);
}

at::Tensor encode_on_host(const at::Tensor& values, int64_t quantization) {
  return encode_on_cpu(values.cpu(), quantization).to(values.device());
}

at::Tensor decode_by_operators(const at::Tensor& held, int64_t quantization, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto [values, scales] = form_of(quantization).decode_by_operators(held);
  const auto scaled = values.reshape({-1, kQuantBlock}) * scales.reshape({-1, 1});
  return scaled.view({-1}).narrow(0, 0, c10::multiply_integers(sizes)).view(sizes).to(dtype);
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("quantize(Tensor values, int quantization) -> Tensor");
  library.def("dequantize(Tensor held, int quantization, int[] sizes, ScalarType dtype) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera, CPU, library) {
  library.impl("quantize", encode_on_cpu);
  library.impl("dequantize", decode_on_cpu);
}
TORCH_LIBRARY_IMPL(tessera, Meta, library) {
  library.impl("quantize", encode_on_meta);
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, library) {
  library.impl("quantize", encode_on_host);
  library.impl("dequantize", decode_by_operators);
}

}  // namespace

std::string_view name_of(Quantization quantization) {
  return kForms[static_cast<size_t>(quantization)].name;
}

Quantization quantization_named(std::string_view name) {
  std::vector<std::string_view> names;
  for (size_t i = 0; i < std::size(kForms); i++) {
    if (kForms[i].name == name) return static_cast<Quantization>(i);
    names.push_back(kForms[i].name);
  }
  throw UsageError("there is no quantisation '{}'; there are {}", name, joined(names));
}

int64_t held_bytes(Quantization quantization, int64_t numel) {
  const auto sizes = held_sizes(form_of(static_cast<int64_t>(quantization)), numel);
  return sizes[0] * sizes[1];
}

at::Tensor quantized(Quantization quantization, const at::Tensor& values) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::quantize", "").typed<decltype(encode_on_cpu)>();
  return op.call(values, static_cast<int64_t>(quantization));
}

at::Tensor dequantized(Quantization quantization, const at::Tensor& held, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto expected = held_sizes(form_of(static_cast<int64_t>(quantization)), c10::multiply_integers(sizes));
  if (held.sizes() != expected || held.scalar_type() != at::kByte) {
    throw UsageError(
        "a weight of [{}] is held as {} in [{}] bytes, but has got {} of [{}]; convert a model before it is quantised, and read "
        "ordinary weights with checkpoint::load_weights",
        joined(sizes), name_of(quantization), joined(expected), c10::toString(held.scalar_type()), joined(held.sizes()));
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::dequantize", "").typed<decltype(decode_on_cpu)>();
  return op.call(held, static_cast<int64_t>(quantization), sizes, dtype);
}

}  // namespace tessera::nn
