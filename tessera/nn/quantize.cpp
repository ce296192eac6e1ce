#include "tessera/nn/quantize.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/lora.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/weight_operator.h"

namespace tessera::nn {
namespace {

/// Multiplies with a quantised weight, whose values are computed in forward, and again in backward.
struct QuantizedProduct : torch::autograd::Function<QuantizedProduct> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& held, int64_t quantization,
                            std::vector<int64_t> sizes) {
    context->save_for_backward({held});
    context->saved_data["quantization"] = quantization;
    context->saved_data["sizes"] = sizes;
    return at::linear(x, dequantized(static_cast<Quantization>(quantization), held, sizes, x.scalar_type()));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto held = context->get_saved_variables()[0];
    const auto sizes = context->saved_data["sizes"].toIntVector();
    const auto& grad = grads[0];
    const auto weight =
        dequantized(static_cast<Quantization>(context->saved_data["quantization"].toInt()), held, sizes, grad.scalar_type());
    auto of_rows = at::linear(rows_of(grad), weight.t());
    auto shape = grad.sizes().vec();
    shape.back() = sizes[1];
    return {of_rows.view(shape), {}, {}, {}};
  }
};

HeldForm held_form_of(Quantization quantization, const at::Tensor& weight) {
  const auto sizes = weight.sizes().vec();
  return {.name = std::string(name_of(quantization)),
          .sizes = sizes,
          .dtype = weight.scalar_type(),
          .encode = [quantization](const at::Tensor& values) { return quantized(quantization, values); },
          .decode = [quantization, sizes](const at::Tensor& held,
                                          at::ScalarType dtype) { return dequantized(quantization, held, sizes, dtype); },
          .instead = [quantization, sizes](std::string_view name, std::span<const c10::IValue> arguments,
                                           const at::Tensor& held) -> std::optional<at::Tensor> {
            const auto x = arguments[0].toTensor();
            if (name != "aten::linear" || !at::isFloatingType(x.scalar_type())) return std::nullopt;
            const auto result = QuantizedProduct::apply(x, held, static_cast<int64_t>(quantization), sizes);
            return arguments[2].isTensor() && arguments[2].toTensor().defined() ? result + arguments[2].toTensor() : result;
          }};
}

}  // namespace

void quantize(ModuleRef model, const QuantizeOptions& options) {
  lora::expect_unmerged(model);
  std::vector<std::string> names;
  std::vector<at::Tensor> weights;
  for (const auto& item : model->named_modules({}, /*include_self=*/false)) {
    const auto* const linear = item.value()->as<torch::nn::LinearImpl>();
    if (linear == nullptr) continue;
    names.push_back(item.key());
    if (!options.layers.contains(item.key(), /*is_linear=*/true)) continue;
    if (const auto* form = held_form(linear->weight)) throw UsageError("quantize: '{}' is quantised to {} already", item.key(), form->name);
    if (!lora::adapters(model).empty() && linear->weight.requires_grad())
      throw UsageError("quantize: '{}' trains as a whole together with adapters; leave it out of QuantizeOptions::layers", item.key());
    if (shard_info(linear->weight))
      throw UsageError("quantize: '{}' is sharded already; quantise before fully_shard, which shards quantised weights", item.key());
    const bool is_tied = std::ranges::any_of(weights, [&](const at::Tensor& other) { return other.is_same(linear->weight); });
    if (is_tied) continue;
    if (!linear->weight.is_meta() && !linear->weight.isfinite().all().item<bool>())
      throw UsageError("quantize: '{}' has values that are NaN or infinite", item.key());
    weights.push_back(linear->weight);
  }
  expect_choice(options.layers, names, weights.size(), "quantize");
  for (const auto& weight : weights) hold_in_form(*model, weight, held_form_of(options.quantization, weight));
#if defined(__GLIBC__)
  ::malloc_trim(0);  // returns the memory of the freed values to the system
#endif
}

}  // namespace tessera::nn
