#include "tessera/nn/rms_norm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <ostream>

#include "tessera/base/error.h"
#include "tessera/nn/row_kernels.h"

namespace tessera::nn {
namespace {

using Two = std::tuple<at::Tensor, at::Tensor>;

constexpr int64_t kRowsAtOnce = 64;  // rows whose gradients are added into one sum, whatever the number of threads, for equal bits

at::ScalarType dtype_of_sums(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// 1 / sqrt(mean of x * x + eps) of each row.
at::Tensor factors_of(const at::Tensor& x, double eps) {
  return (x.to(dtype_of_sums(x)).square().mean(-1) + eps).rsqrt();
}

Two forward_of(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const auto wide = x.to(dtype_of_sums(x)), r = factors_of(x, eps);
  return {(wide * r.unsqueeze(-1) * weight.to(wide.scalar_type())).to(x.scalar_type()), r};
}

Two backward_of(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& r) {
  const auto dtype = r.scalar_type();
  const auto wide = x.to(dtype), g = grad.to(dtype), by_row = r.unsqueeze(-1);
  const auto of_normal = g * weight.to(dtype), normal = wide * by_row;
  const auto along = (of_normal * normal).mean(-1, /*keepdim=*/true);
  std::vector<int64_t> all_but_last(static_cast<size_t>(x.dim() - 1));
  for (size_t i = 0; i < all_but_last.size(); i++) all_but_last[i] = static_cast<int64_t>(i);
  const auto of_weight = g * normal;
  return {((of_normal - normal * along) * by_row).to(x.scalar_type()),
          (all_but_last.empty() ? of_weight : of_weight.sum(all_but_last)).to(weight.scalar_type())};
}

/// Whether the kernels support these tensors.
bool fits(const at::Tensor& x, const at::Tensor& weight) {
  const auto dtype = x.scalar_type();
  const bool has_weight = weight.scalar_type() == dtype || weight.scalar_type() == at::kFloat;
  return (dtype == at::kFloat || dtype == at::kBFloat16) && has_weight && x.numel() > 0;
}

/// Calls act with a pointer of the kernels' type for each tensor.
void with_values(const auto& act, const auto&... tensors) {
  const std::array<at::ScalarType, sizeof...(tensors)> dtypes = {tensors.scalar_type()...};
  if (dtypes[0] == at::kFloat) return act(static_cast<float*>(tensors.data_ptr())...);
  act(static_cast<uint16_t*>(tensors.data_ptr())...);
}

Two forward_on_cpu(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (!fits(x, weight)) return forward_of(x, weight, eps);
  const auto rows = x.contiguous(), scale = weight.to(at::kFloat).contiguous();
  auto y = at::empty_like(rows);
  auto r = at::empty(x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)), x.options().dtype(at::kFloat));
  with_values(
      [&]<class T>(T* from, T* to) {
        const NormForward<T> norm{from, scale.data_ptr<float>(), to, r.data_ptr<float>(), weight.numel(), static_cast<float>(eps)};
        at::parallel_for(0, r.numel(), kRowsAtOnce, [&](int64_t begin, int64_t end) { run(norm, begin, end); });
      },
      rows, y);
  return {y, r};
}

Two backward_on_cpu(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& r) {
  if (!fits(x, weight) || grad.scalar_type() != x.scalar_type()) return backward_of(grad, x, weight, r);
  const auto rows = x.contiguous(), gradients = grad.contiguous(), scale = weight.to(at::kFloat).contiguous();
  auto grad_x = at::empty_like(rows);
  const auto parts = at::divup(r.numel(), kRowsAtOnce);
  const auto sums = at::zeros({parts, weight.numel()}, r.options());
  with_values(
      [&]<class T>(T* from, T* values, T* to) {
        const NormBackward<T> norm{from, values, scale.data_ptr<float>(), r.data_ptr<float>(), to, weight.numel()};
        at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
          for (auto part = begin; part < end; part++)
            run(norm, part * kRowsAtOnce, std::min((part + 1) * kRowsAtOnce, r.numel()), sums.data_ptr<float>() + part * weight.numel());
        });
      },
      gradients, rows, grad_x);
  return {grad_x, sums.sum(0).to(weight.scalar_type())};
}

struct RmsNormalize : torch::autograd::Function<RmsNormalize> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::rms_norm", "").typed<decltype(forward_of)>();
    auto [y, r] = op.call(x, weight, eps);
    context->save_for_backward({x, weight, r});
    context->saved_data["eps"] = eps;
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::rms_norm_backward", "").typed<decltype(backward_of)>();
    const auto saved = context->get_saved_variables();
    // With create_graph, computes the factors from x again, by operators, so that the gradients can be differentiated again.
    const bool is_recorded = c10::GradMode::is_enabled();
    auto [of_x, of_weight] = is_recorded
                                 ? backward_of(grads[0], saved[0], saved[1], factors_of(saved[0], context->saved_data["eps"].toDouble()))
                                 : op.call(grads[0], saved[0], saved[1], saved[2]);
    return {of_x, of_weight, {}};
  }
};

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor r) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(tessera, CPU, library) {
  library.impl("rms_norm", forward_on_cpu);
  library.impl("rms_norm_backward", backward_on_cpu);
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, library) {
  library.impl("rms_norm", forward_of);
  library.impl("rms_norm_backward", backward_of);
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  // The kernels' loops trust the size of the weight, and would read beyond the end of x.
  if (x.dim() < 1 || weight.dim() != 1 || weight.size(0) != x.size(-1))
    throw UsageError("rms_norm: a weight of [{}] does not fit values of [{}]; it must have one value for each of the last dimension",
                     joined(weight.sizes()), joined(x.sizes()));
  return RmsNormalize::apply(x, weight, eps);
}

RmsNormImpl::RmsNormImpl(int64_t size, double eps, double offset)
    : eps(eps), offset(offset), weight(register_parameter("weight", at::full({size}, 1 - offset))) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  return rms_norm(x, offset == 0 ? weight : weight.to(dtype_of_sums(x)) + offset, eps);
}

void RmsNormImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::RmsNorm(" << weight.numel() << ", eps=" << eps << ")";
}

}  // namespace tessera::nn
