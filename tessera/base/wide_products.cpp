#include "tessera/base/wide_products.h"

#include <ATen/CPUFunctions.h>
#include <ATen/CompositeExplicitAutogradFunctions.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/Resize.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "tessera/base/launcher.h"
#include "tessera/base/log.h"

namespace tessera {
namespace {

void say_once(at::ScalarType dtype) {
  static std::atomic<bool> is_said = false;
  if (is_said.exchange(true) || local_rank_from_environment().value_or(0) != 0) return;
  log(LogLevel::Warning, fmt::format("this processor has no instructions for products of {}; they are computed in float32 and rounded, "
                                     "which takes about as long as in float32",
                                     c10::toString(dtype)));
}

at::Tensor widened(const at::Tensor& tensor) {
  return tensor.defined() && multiplies_slowly(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}
std::optional<at::Tensor> widened(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(widened(*tensor)) : std::nullopt;
}
template <class Other>
Other widened(const Other& other) {
  return other;
}

/// Whether an argument is a tensor of another dtype.
bool differs(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.scalar_type() != dtype;
}
bool differs(const std::optional<at::Tensor>& tensor, at::ScalarType dtype) {
  return tensor && differs(*tensor, dtype);
}
template <class Other>
bool differs(const Other&, at::ScalarType) {
  return false;
}

at::Tensor rounded(const at::Tensor& result, at::ScalarType dtype) {
  return result.defined() ? result.to(dtype) : result;
}
/// Rounds the first result of attention, and leaves the second one, the log-sum-exps for backward, in float32, as libtorch does.
std::tuple<at::Tensor, at::Tensor> rounded(const std::tuple<at::Tensor, at::Tensor>& results, at::ScalarType dtype) {
  return {rounded(std::get<0>(results), dtype), std::get<1>(results)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> rounded(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& gradients,
                                                       at::ScalarType dtype) {
  const auto& [first, second, third] = gradients;
  return {rounded(first, dtype), rounded(second, dtype), rounded(third, dtype)};
}

/// Wraps a kernel, so that it computes in float32 where the dtype is slow.
template <auto kernel>
struct Wide;

template <class Result, class First, class Second, class... Others, Result (*kernel)(First, Second, Others...)>
struct Wide<kernel> {
  static Result run(First first, Second second, Others... others) {
    const auto dtype = second.scalar_type();  // the second argument is a factor in each of these kernels
    if (!multiplies_slowly(dtype)) return kernel(first, second, others...);
    if constexpr (std::is_same_v<std::remove_reference_t<Result>, at::Tensor>) {
      // Factors of different dtypes are an error of libtorch's, which widened arguments would hide.
      if (differs(first, dtype) || (differs(others, dtype) || ...)) return kernel(first, second, others...);
    }
    say_once(dtype);
    auto wide = std::tuple(widened(first), widened(second), widened(others)...);
    const auto compute = [](auto&... arguments) -> decltype(auto) { return kernel(arguments...); };
    if constexpr (std::is_same_v<Result, at::Tensor&>) {
      const auto& result = std::apply(compute, wide);
      auto& written = *written_of(first, second, others...);
      at::native::resize_output(written, result.sizes());
      return written.copy_(result);
    } else {
      return rounded(std::apply(compute, wide), dtype);
    }
  }

 private:
  /// Returns the argument that is not const: the result, which is the first or the last argument.
  template <class... Arguments>
  static at::Tensor* written_of(Arguments&... arguments) {
    at::Tensor* written = nullptr;
    const auto look = [&](auto& argument) {
      if constexpr (std::is_same_v<decltype(argument), at::Tensor&>) written = &argument;
    };
    (look(arguments), ...);
    return written;
  }
};

constexpr int64_t kStrip = 1 << 19;  // values that are widened at a time: 2 MB, which a cache holds until they are used

using Take = c10::function_ref<void(int64_t begin, const at::Tensor& part)>;

/// Whether one of the matrices, or their product, is too large for a cache: widened as a whole it would pass through memory twice more.
bool is_for_strips(const at::Tensor& a, const at::Tensor& b) {
  const auto dtype = a.scalar_type();
  if (!multiplies_slowly(dtype) || b.scalar_type() != dtype || a.dim() != 2 || b.dim() != 2 || a.size(1) != b.size(0)) return false;
  int64_t sizes[] = {a.numel(), b.numel(), a.size(0) * b.size(1)};
  std::ranges::sort(sizes);
  return sizes[2] > kStrip && sizes[1] <= kStrip;  // each strip needs the two smaller matrices, so a cache must hold them, too
}

void for_each_strip(const at::Tensor& matrix, int64_t dim, Take take) {
  const auto step = std::max<int64_t>(kStrip / std::max<int64_t>(matrix.size(1 - dim), 1), 1);
  auto sizes = matrix.sizes().vec();
  sizes[static_cast<size_t>(dim)] = std::min(step, matrix.size(dim));
  // Strips have the memory order of the matrix, so that copies into them are contiguous.
  const auto buffer = dim == 0 ? at::empty(sizes, matrix.options().dtype(at::kFloat))
                               : at::empty({sizes[1], sizes[0]}, matrix.options().dtype(at::kFloat)).t();
  for (int64_t begin = 0; begin < matrix.size(dim); begin += step) {
    const auto count = std::min(step, matrix.size(dim) - begin);
    auto strip = buffer.narrow(dim, 0, count);
    take(begin, strip.copy_(matrix.narrow(dim, begin, count)));
  }
}

/// Multiplies if the product is larger than both factors: `take` gets strips of the product's rows one by one.
void multiply_by_rows(const at::Tensor& a, const at::Tensor& narrow_b, Take take) {
  const auto b = widened(narrow_b);
  const auto rows = std::max<int64_t>(kStrip / b.size(1), 1);
  auto buffer = at::empty({std::min(rows, a.size(0)), b.size(1)}, b.options());
  for (int64_t begin = 0; begin < a.size(0); begin += rows) {
    const auto count = std::min(rows, a.size(0) - begin);
    auto strip = buffer.narrow(0, 0, count);
    at::cpu::mm_out(strip, widened(a.narrow(0, begin, count)), b);
    take(begin, strip);
  }
}

/// Multiplies in float32. `take` gets the product, or strips of its rows.
void multiply_in_strips(const at::Tensor& a, const at::Tensor& b, Take take) {
  say_once(a.scalar_type());
  const auto numel = a.size(0) * b.size(1);
  if (numel >= a.numel() && numel >= b.numel()) return multiply_by_rows(a, b, take);
  const bool of_a = a.numel() > b.numel();
  const auto& large = of_a ? a : b;
  const auto small = widened(of_a ? b : a);
  const int64_t dim = large.stride(0) >= large.stride(1) ? 0 : 1;
  const int64_t inner = of_a ? 1 : 0;
  const auto product = at::zeros({a.size(0), b.size(1)}, small.options());
  for_each_strip(large, dim, [&](int64_t begin, const at::Tensor& strip) {
    const auto count = strip.size(dim);
    // Products of strips along the inner dimension add up.
    const auto other = dim == inner ? small.narrow(1 - inner, begin, count) : small;
    auto part = dim == inner ? product : product.narrow(dim, begin, count);
    at::cpu::addmm_(part, of_a ? strip : other, of_a ? other : strip);
  });
  take(0, product);
}

at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  if (!is_for_strips(a, b)) return Wide<at::cpu::mm>::run(a, b);
  auto result = at::empty({a.size(0), b.size(1)}, a.options());
  multiply_in_strips(a, b, [&](int64_t begin, const at::Tensor& rows) { result.narrow(0, begin, rows.size(0)).copy_(rows); });
  return result;
}

at::Tensor addmm(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  if (!is_for_strips(a, b) || self.scalar_type() != a.scalar_type() || alpha.toDouble() == 0)
    return Wide<at::cpu::addmm>::run(self, a, b, beta, alpha);
  auto result = at::empty({a.size(0), b.size(1)}, a.options());
  const auto added = self.expand(result.sizes());
  const bool adds = beta.toDouble() != 0;  // if not, `self` is ignored even where it is NaN, as in libtorch
  multiply_in_strips(a, b, [&](int64_t begin, const at::Tensor& rows) {
    const auto count = rows.size(0);
    auto sum = alpha.toDouble() == 1 ? rows : rows * alpha;
    if (adds) sum = sum.add_(added.narrow(0, begin, count), beta);
    result.narrow(0, begin, count).copy_(sum);
  });
  return result;
}

/// Registers kernels when the library is loaded, while no other thread looks for one.
class Registration {
 public:
  Registration() {
    if (!multiplies_slowly(at::kBFloat16) && !multiplies_slowly(at::kHalf)) return;
    struct Silent : c10::WarningHandler {
      void process(const c10::Warning&) override {}  // the replacement of kernels is on purpose
    } silent;
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    library_ = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library_->impl("mm", torch::dispatch(c10::DispatchKey::CPU, &mm));
    library_->impl("addmm", torch::dispatch(c10::DispatchKey::CPU, &addmm));
    add<at::cpu::mm_outf>("mm.out");
    add<at::cpu::addmm_>("addmm_");
    add<at::cpu::addmm_outf>("addmm.out");
    add<at::cpu::bmm>("bmm");
    add<at::cpu::bmm_outf>("bmm.out");
    add<at::cpu::baddbmm>("baddbmm");
    add<at::cpu::baddbmm_>("baddbmm_");
    add<at::cpu::baddbmm_outf>("baddbmm.out");
    add<at::cpu::addmv>("addmv");
    add<at::cpu::addmv_>("addmv_");
    add<at::cpu::addmv_outf>("addmv.out");
    add<at::compositeexplicitautograd::_convolution>("_convolution");  // which aten::convolution calls
    add<at::compositeexplicitautograd::convolution_backward>("convolution_backward");
    add<at::cpu::_scaled_dot_product_flash_attention_for_cpu>("_scaled_dot_product_flash_attention_for_cpu");
    add<at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward>("_scaled_dot_product_flash_attention_for_cpu_backward");
  }

 private:
  template <auto kernel>
  void add(const char* name) {
    library_->impl(name, torch::dispatch(c10::DispatchKey::CPU, &Wide<kernel>::run));
  }

  std::unique_ptr<torch::Library> library_;
};

const Registration registration;

#if defined(__x86_64__)
/// Clang before 19 does not know this feature by name.
bool has_avx512fp16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx512f") != 0 && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (1U << 23)) != 0;
}
#endif

}  // namespace

bool multiplies_slowly([[maybe_unused]] at::ScalarType dtype) {
#if defined(__x86_64__)
  static const bool no_bfloat16 = __builtin_cpu_supports("avx512bf16") == 0;  // processors with AMX have it, too
  static const bool no_float16 = !has_avx512fp16();
  return (dtype == at::kBFloat16 && no_bfloat16) || (dtype == at::kHalf && no_float16);
#else
  return false;  // not measured
#endif
}

}  // namespace tessera
