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

namespace tessera::simulate {
namespace {

using Operands = c10::ArrayRef<c10::IValue>;

Product of_matrices(double batch, double rows, double inner, double columns) {
  return {.flops = 2 * batch * rows * inner * columns, .smallest_side = std::min({rows, inner, columns})};
}

double side(const at::Tensor& tensor, int64_t dim) {
  return static_cast<double>(tensor.size(dim));
}

/// The product of two matrices, or of two batches of matrices, which are arguments `first` and `first` + 1.
template <size_t first>
Product of_two(Operands operands) {
  const auto &a = operands[first].toTensor(), &b = operands[first + 1].toTensor();
  return of_matrices(a.dim() == 3 ? side(a, 0) : 1, side(a, -2), side(a, -1), side(b, -1));
}

Product of_linear(Operands operands) {
  const auto &x = operands[0].toTensor(), &weight = operands[1].toTensor();
  const auto inner = side(weight, -1);
  return of_matrices(1, static_cast<double>(x.numel()) / std::max(1.0, inner), inner, side(weight, 0));
}

/// Queries, keys and values of {batch, heads, length, size} begin at `first`; `products` of that size are computed.
template <size_t first, int products>
Product of_attention(Operands operands) {
  const auto &queries = operands[first].toTensor(), &keys = operands[first + 1].toTensor();
  auto product = of_matrices(side(queries, 0) * side(queries, 1), side(queries, -2), side(queries, -1), side(keys, -2));
  product.flops *= products;
  return product;
}

double of_kernel(const at::Tensor& weight) {  // of one value of the result
  return 2 * static_cast<double>(c10::multiply_integers(weight.sizes().slice(1)));
}

double values_of(const at::Tensor& x, const at::Tensor& weight, Operands operands, size_t stride, double per_value) {
  const auto sizes = convolved_sizes(x, weight, operands[stride].toIntVector(), operands[stride + 1].toIntVector(),
                                     operands[stride + 2].toIntVector(), operands[stride + 3].toBool(), operands[stride + 4].toIntVector(),
                                     operands[stride + 5].toInt());
  // A transposed convolution multiplies each of its inputs with the kernel.
  const auto values = operands[stride + 3].toBool() ? static_cast<double>(x.numel()) : static_cast<double>(c10::multiply_integers(sizes));
  return values * per_value;
}

Product of_convolution(Operands operands) {
  const auto &x = operands[0].toTensor(), &weight = operands[1].toTensor();
  return {.flops = values_of(x, weight, operands, 3, of_kernel(weight)), .is_convolution = true};
}

Product of_convolution_backward(Operands operands) {
  const auto &x = operands[1].toTensor(), &weight = operands[2].toTensor();
  const auto mask = operands[10].toBoolList();
  const int gradients = (mask.get(0) ? 1 : 0) + (mask.get(1) ? 1 : 0);
  return {.flops = gradients * values_of(x, weight, operands, 4, of_kernel(weight)), .is_convolution = true};
}

using Formula = Product (*)(Operands);
const std::unordered_map<std::string_view, Formula>& formulas() {
  static const std::unordered_map<std::string_view, Formula> all = {
      {"aten::mm", of_two<0>},
      {"aten::bmm", of_two<0>},
      {"aten::addmm", of_two<1>},
      {"aten::addmm_", of_two<1>},
      {"aten::baddbmm", of_two<1>},
      {"aten::linear", of_linear},
      {"aten::convolution", of_convolution},
      {"aten::convolution_backward", of_convolution_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", of_attention<0, 2>},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", of_attention<1, 5>},
      {"aten::_scaled_dot_product_flash_attention", of_attention<0, 2>},
      {"aten::_scaled_dot_product_flash_attention_backward", of_attention<1, 5>},
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

namespace {

thread_local int uncounted = 0;

}  // namespace

FlopCounter::FlopCounter() {
  watch_operators();
  on_operator = [](const c10::OperatorHandle& handle, const torch::jit::Stack& stack) {
    if (uncounted > 0) return;
    if (const auto product = product_of(handle, stack)) State::add(product->flops);
  };
  state_ = std::make_unique<State>();
}

FlopCounter::~FlopCounter() = default;

double FlopCounter::flops() const {
  return state_->flops;
}

Uncounted::Uncounted() {
  uncounted++;
}

Uncounted::~Uncounted() {
  uncounted--;
}

}  // namespace tessera::simulate
