// Encodes and decodes the formats of quantised weights.
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
#include "tessera/comm/simulation.h"
#include "tessera/nn/quantize.h"
#include "tessera/nn/row_kernels.h"

namespace tessera::nn {
namespace {

using ByteValues = std::array<float, 256>;

/// The layout of a format: a sequence of blocks. A block has codes, followed by the data for the scales, one scale for each 64 values. The
/// last block is filled up with zeros.
struct Form {
  std::string_view name;
  int64_t values;  // the number of values in a block
  int64_t bytes;
  void (*encode)(const at::Tensor& values, const at::Tensor& held);
  const ByteValues& (*of_byte)();  // the value of each byte; null for NF4, which has two values in a byte
  bool nests;                      // whether scales are stored in 8 bits, with a scale and a mean of their own, or as floats

  int64_t codes() const { return of_byte == nullptr ? values / 2 : values; }
  int64_t scales() const { return values / kQuantBlock; }
};

constexpr int64_t kNested = DynamicCode::kBlock;            // the number of scales that share a scale
constexpr int64_t kNf4Values = kNested * kQuantBlock;       // values in a block of NF4
constexpr int64_t kNf4Codes = kNf4Values / 2;               // the bytes of their codes
constexpr int64_t kNf4Bytes = kNf4Codes + kNested + 2 * 4;  // codes, a byte per scale, and the scale and the mean of the scales
constexpr int64_t kGrain = 16384;                           // the fewest values that are worth a thread of their own

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
  if (auto* const simulation = Simulation::current()) return simulation->pass_over(static_cast<uint64_t>(numel) * 5);
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

/// Encodes blocks with a byte for each value, followed by a scale for each 64 values. `code` gets values divided by the scale, so that the
/// largest is `most`.
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
ByteValues values_of_bytes(const Of& of) {
  ByteValues values = {};
  for (size_t byte = 0; byte < values.size(); byte++) values[byte] = of(static_cast<uint8_t>(byte));
  return values;
}

const ByteValues& int8_values() {
  static const auto values = values_of_bytes([](uint8_t byte) { return static_cast<float>(static_cast<int8_t>(byte)); });
  return values;
}

const ByteValues& fp8_values() {
  static const auto values =
      values_of_bytes([](uint8_t byte) { return static_cast<float>(c10::Float8_e4m3fn(byte, c10::Float8_e4m3fn::from_bits())); });
  return values;
}

constexpr Form kForms[] = {
    {"nf4", kNf4Values, kNf4Bytes, encode_nf4, nullptr, true},
    {"nf4_single", kQuantBlock, kQuantBlock / 2 + 4, encode_nf4_single, nullptr, false},
    {"int8", kQuantBlock, kQuantBlock + 4, encode_int8, int8_values, false},
    {"fp8", kFp8Values, kFp8Values + 8, encode_fp8, fp8_values, false},
};

/// Finds the scales of a block for its first `count` values.
void scales_of(const Form& form, const uint8_t* block, int64_t count, float* scales) {
  const auto* const behind_codes = block + form.codes();
  if (!form.nests) {
    std::memcpy(scales, behind_codes, static_cast<size_t>(form.scales()) * sizeof(float));
    return;
  }
  const auto& code = DynamicCode::of_signed();
  const float nested = float_at(behind_codes + kNested), mean = float_at(behind_codes + kNested + 4);
  for (int64_t i = 0; i * kQuantBlock < count; i++) {
    const float difference = code.value(behind_codes[i]) * nested;
    scales[i] = difference + mean;
  }
}

at::Tensor looked_up(std::span<const float> table, const at::Tensor& codes) {
  const auto values = at::tensor(std::vector<float>(table.begin(), table.end())).to(codes.device());
  return values.index_select(0, codes.flatten().to(at::kInt)).view(codes.sizes());
}

/// The floats at the end of each block.
at::Tensor last_floats(const at::Tensor& held, int64_t count) {
  return held.narrow(1, held.size(1) - 4 * count, 4 * count).contiguous().view(at::kFloat);
}

/// Decodes all blocks by operators of libtorch, which run on any device. The values are not yet multiplied by the scales of their blocks.
at::Tensor unscaled(const Form& form, const at::Tensor& held) {
  const auto codes = held.narrow(1, 0, form.codes());
  if (form.of_byte == nullptr) return looked_up(kNf4, at::stack({codes.bitwise_right_shift(4), codes.bitwise_and(15)}, -1));
  return form.of_byte == int8_values ? codes.contiguous().view(at::kChar) : looked_up(form.of_byte(), codes);
}

at::Tensor scales_by_operators(const Form& form, const at::Tensor& held) {
  if (!form.nests) return last_floats(held, form.scales());
  const auto nested_and_mean = last_floats(held, 2);
  const auto scales = looked_up(DynamicCode::of_signed().values(), held.narrow(1, form.codes(), kNested));
  return scales * nested_and_mean.narrow(1, 0, 1) + nested_and_mean.narrow(1, 1, 1);
}

template <class Number>
const Form& form_of(Number quantization) {
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
  const auto* const of_byte = form.of_byte == nullptr ? nullptr : form.of_byte().data();
  const auto decode = [&](auto* to) {
    for_blocks(values.numel(), form.values, [&](int64_t block, int64_t begin, int64_t count) {
      float scales[kNested];
      const auto* const from = bytes + block * form.bytes;
      scales_of(form, from, count, scales);
      of_byte == nullptr ? nf4_values(from, scales, count, to + begin) : byte_values(from, of_byte, scales, count, to + begin);
    });
  };
  is_bfloat ? decode(reinterpret_cast<uint16_t*>(values.mutable_data_ptr<at::BFloat16>())) : decode(values.mutable_data_ptr<float>());
  return values.to(dtype);
}

at::Tensor encode_on_host(const at::Tensor& values, int64_t quantization) {
  return encode_on_cpu(values.cpu(), quantization).to(values.device());
}

at::Tensor decode_by_operators(const at::Tensor& held, int64_t quantization, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto& form = form_of(quantization);
  const auto scaled = unscaled(form, held).reshape({-1, kQuantBlock}) * scales_by_operators(form, held).reshape({-1, 1});
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
  return form_of(quantization).name;
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
  const auto sizes = held_sizes(form_of(quantization), numel);
  return sizes[0] * sizes[1];
}

at::Tensor quantized(Quantization quantization, const at::Tensor& values) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::quantize", "").typed<decltype(encode_on_cpu)>();
  return op.call(values, static_cast<int64_t>(quantization));
}

at::Tensor dequantized(Quantization quantization, const at::Tensor& held, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto expected = held_sizes(form_of(quantization), c10::multiply_integers(sizes));
  if (held.sizes() != expected || held.scalar_type() != at::kByte) {
    throw UsageError(
        "a weight of [{}] is quantised to {} in [{}] bytes, but was given {} of [{}]; convert a model before it is quantised, and read "
        "ordinary weights with checkpoint::load_weights",
        joined(sizes), name_of(quantization), joined(expected), c10::toString(held.scalar_type()), joined(held.sizes()));
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::dequantize", "").typed<decltype(decode_on_cpu)>();
  return op.call(held, static_cast<int64_t>(quantization), sizes, dtype);
}

}  // namespace tessera::nn
