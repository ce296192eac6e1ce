#include "tessera/simulate/flops.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/simulate/operators.h"
#include "tessera/simulate/shapes.h"

namespace tessera::simulate {
namespace {

double side(const at::Tensor& tensor, int64_t dim) {
  return static_cast<double>(tensor.size(dim));
}

Product of_matrices(double batch, double rows, double inner, double columns) {
  return {.flops = 2 * batch * rows * inner * columns, .smallest_side = std::min({rows, inner, columns})};
}

/// The product of two matrices, or of two batches of matrices, which are arguments `first` and `first` + 1.
template <size_t first>
Product of_two(Operands in) {
  const auto &a = in[first].toTensor(), &b = in[first + 1].toTensor();
  return of_matrices(a.dim() == 3 ? side(a, 0) : 1, side(a, -2), side(a, -1), side(b, -1));
}

/// Queries, keys and values of {batch, heads, length, size} begin at `first`; `products` of that size are computed.
template <size_t first, int products>
Product of_attention(Operands in) {
  const auto &queries = in[first].toTensor(), &keys = in[first + 1].toTensor();
  return of_matrices(products * side(queries, 0) * side(queries, 1), side(queries, -2), side(queries, -1), side(keys, -2));
}

/// The input and the weight begin at `first`, and the stride at `stride`.
template <size_t first, size_t stride>
Product of_convolution(Operands in) {
  const auto &x = in[first].toTensor(), &weight = in[first + 1].toTensor();
  // A transposed convolution multiplies each of its inputs with the kernel, others do so for each result.
  const bool is_transposed = in[stride + 3].toBool();
  const auto values = is_transposed ? x.numel() : c10::multiply_integers(convolved_sizes(x, weight, in.slice(stride)));
  const auto kernel = c10::multiply_integers(weight.sizes().slice(1));
  return {.flops = 2 * static_cast<double>(values) * static_cast<double>(kernel), .is_convolution = true};
}

Product of_convolution_backward(Operands in) {
  auto product = of_convolution<1, 4>(in);
  const auto mask = in[10].toBoolList();
  product.flops *= (mask.get(0) ? 1 : 0) + (mask.get(1) ? 1 : 0);
  return product;
}

const std::unordered_map<std::string_view, Product (*)(Operands)>& formulas() {
  static const std::unordered_map<std::string_view, Product (*)(Operands)> all = {
      {"aten::mm", of_two<0>},
      {"aten::bmm", of_two<0>},
      {"aten::addmm", of_two<1>},
      {"aten::addmm_", of_two<1>},
      {"aten::baddbmm", of_two<1>},
      {"aten::convolution", of_convolution<0, 3>},
      {"aten::convolution_backward", of_convolution_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", of_attention<0, 2>},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", of_attention<1, 5>},
      {"aten::_scaled_dot_product_flash_attention", of_attention<0, 2>},
      {"aten::_scaled_dot_product_flash_attention_backward", of_attention<1, 5>},
      {"aten::_scaled_dot_product_cudnn_attention", of_attention<0, 2>},
      {"aten::_scaled_dot_product_cudnn_attention_backward", of_attention<1, 5>},
      {"aten::_scaled_dot_product_efficient_attention", of_attention<0, 2>},
      {"aten::_scaled_dot_product_efficient_attention_backward", of_attention<1, 5>},
  };
  return all;
}

}  // namespace

std::optional<Product> product_of(const c10::OperatorHandle& handle, const torch::jit::Stack& stack) {
  const auto found = formulas().find(handle.operator_name().name);
  if (found == formulas().end()) return std::nullopt;
  return found->second(Operands(stack).slice(stack.size() - handle.schema().arguments().size()));
}

// Ranks may be threads of one process, each with a counter. Operators of the backward pass on a device run in a thread of libtorch, which gets
// the dispatch keys of the thread that started the pass but knows no counter, and so counts for the one that was made last.
struct FlopCounter::State {
  std::atomic<double> flops = 0;
  State* const before = of_thread;
  c10::impl::IncludeDispatchKeyGuard seen{kSimulationKey};

  inline static thread_local State* of_thread = nullptr;
  inline static std::mutex mutex;
  inline static std::vector<State*> all;  // guarded by mutex

  State() {
    of_thread = this;
    const std::lock_guard lock(mutex);
    all.push_back(this);
  }
  ~State() {
    of_thread = before;
    const std::lock_guard lock(mutex);
    std::erase(all, this);
  }
  static void add(double flops) {
    if (of_thread != nullptr) {
      of_thread->flops += flops;
      return;
    }
    const std::lock_guard lock(mutex);
    if (!all.empty()) all.back()->flops += flops;
  }
};

FlopCounter::FlopCounter() {
  watch_operators();
  on_operator = [](const c10::OperatorHandle& handle, const torch::jit::Stack& stack) {
    if (Uncounted::applies()) return;
    if (const auto product = product_of(handle, stack)) State::add(product->flops);
  };
  state_ = std::make_unique<State>();
}

FlopCounter::~FlopCounter() = default;

double FlopCounter::flops() const {
  return state_->flops;
}

}  // namespace tessera::simulate
