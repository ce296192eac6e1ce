#include "tessera/nn/swiglu.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera::nn {
namespace {

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return at::silu(gate).mul_(up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto &gate = saved[0], &up = saved[1];
    if (c10::GradMode::is_enabled()) {  // with create_graph: libtorch has no derivative of silu_backward
      const auto share = at::sigmoid(gate);
      return {grads[0] * up * share * (1 + gate * (1 - share)), grads[0] * gate * share};
    }
    return {at::silu_backward(grads[0] * up, gate), at::silu(gate).mul_(grads[0])};
  }
};

struct GeGlu : torch::autograd::Function<GeGlu> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return at::gelu(gate, "tanh").mul_(up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {at::gelu_backward(grads[0] * saved[1], saved[0], "tanh"), at::gelu(saved[0], "tanh") * grads[0]};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return SwiGlu::apply(gate, up);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) {
  return GeGlu::apply(gate, up);
}

}  // namespace tessera::nn
