#include "tessera/nn/linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/shard/weight_forms.h"

namespace tessera::nn {
namespace {

bool multiplies_bfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;  // which those with AMX have, too
#else
  return true;  // not measured
#endif
}

/// Computed in float32 and rounded once. What is kept for backward is narrow.
struct WideProduct : torch::autograd::Function<WideProduct> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    context->save_for_backward({x, weight});
    context->saved_data["bias"] = bias.has_value();
    const auto wide_bias = bias ? std::optional(bias->to(at::kFloat)) : std::nullopt;
    return at::linear(x.to(at::kFloat), weight.to(at::kFloat), wide_bias).to(x.scalar_type());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto rows = [](const at::Tensor& values) { return values.to(at::kFloat).reshape({-1, values.size(-1)}); };
    const auto dtype = saved[0].scalar_type();
    const auto grad = rows(grads[0]);
    at::Tensor of_x, of_weight, of_bias;
    if (context->needs_input_grad(0)) of_x = grad.mm(saved[1].to(at::kFloat)).to(dtype).view(saved[0].sizes());
    if (context->needs_input_grad(1)) of_weight = grad.t().mm(rows(saved[0])).to(dtype);
    if (context->saved_data["bias"].toBool()) of_bias = grad.sum(0).to(dtype);
    return {of_x, of_weight, of_bias};
  }
};

}  // namespace

bool multiplies_slowly(const at::Tensor& x, const at::Tensor& weight) {
  const bool narrow = x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 && x.device().is_cpu();
  return narrow && !multiplies_bfloat16();
}

at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return multiplies_slowly(x, weight) && !has_stand_in(weight) ? wide_product(x, weight, bias) : at::linear(x, weight, bias);
}

at::Tensor wide_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return WideProduct::apply(x, weight, bias);
}

}  // namespace tessera::nn
