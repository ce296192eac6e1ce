// Holds frozen weights in few bits, as the base of QLoRA.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "tessera/base/module_ref.h"
#include "tessera/nn/layer_choice.h"

namespace tessera::nn {

/// The formats of quantised weights: blocks of values with a scale. NF4 has the same bits as in bitsandbytes.
enum class Quantization {
  Nf4,        // 4-bit codes of quantiles of a normal distribution, in blocks of 64; their scales in 8 bits, in blocks of 256
  Nf4Single,  // the same codes with scales in float32, without double quantisation
  Int8,       // blocks of 64
  Fp8,        // e4m3, blocks of 64
};
std::string_view name_of(Quantization quantization);
/// Throws UsageError, which lists the known names, for another name.
Quantization quantization_named(std::string_view name);

/// The bytes that a weight of `numel` values takes.
int64_t held_bytes(Quantization quantization, int64_t numel);

/// Encode all values of a weight as bytes of the shape {blocks, bytes}, and decode them.
at::Tensor quantized(Quantization quantization, const at::Tensor& values);
at::Tensor dequantized(Quantization quantization, const at::Tensor& held, at::IntArrayRef sizes, at::ScalarType dtype);

struct QuantizeOptions {
  Quantization quantization = Quantization::Nf4;
  LayerChoice layers = {};  // linear layers
};

/// Quantises weights of linear layers. They are frozen, `parameters()` lists their bytes, and an operator that needs a weight gets its
/// decoded values, one weight at a time. Call it before fully_shard, on a model with values or within deferred_init. Loading quantises the
/// values that it reads. Throws UsageError, and changes nothing, if a name matches no layer.
void quantize(ModuleRef model, const QuantizeOptions& options = {});

}  // namespace tessera::nn
