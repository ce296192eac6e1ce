#include "tessera/base/wide_products.h"

#include <ATen/CPUFunctions.h>
#include <ATen/CompositeExplicitAutogradFunctions.h>
#include <ATen/native/Resize.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>

#include "tessera/base/log.h"

namespace tessera {
namespace {

void say_once(at::ScalarType dtype) {
  static std::atomic<bool> is_said = false;
  if (is_said.exchange(true)) return;
  log(LogLevel::Warning,
      fmt::format(
          "this processor has no instructions for products of {}; they are computed in float32 and rounded, which is as fast as float32",
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
/// Of attention: its values, and sums that backward takes, which libtorch keeps in float32.
std::tuple<at::Tensor, at::Tensor> rounded(const std::tuple<at::Tensor, at::Tensor>& results, at::ScalarType dtype) {
  return {rounded(std::get<0>(results), dtype), std::get<1>(results)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> rounded(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& gradients,
                                                       at::ScalarType dtype) {
  const auto& [first, second, third] = gradients;
  return {rounded(first, dtype), rounded(second, dtype), rounded(third, dtype)};
}

/// One of libtorch's kernels, which does in float32 what would be slow.
template <auto kernel>
struct Wide;

template <class Result, class First, class Second, class... Others, Result (*kernel)(First, Second, Others...)>
struct Wide<kernel> {
  static Result run(First first, Second second, Others... others) {
    const auto dtype = second.scalar_type();  // of a factor, in each of them
    if (!multiplies_slowly(dtype)) return kernel(first, second, others...);
    if constexpr (std::is_same_v<std::remove_reference_t<Result>, at::Tensor>) {
      // An error of libtorch's, which wide arguments would hide.
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
  /// The one argument that is not constant, which comes first or last.
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

/// Registers kernels when the library is loaded, while no other thread looks for one.
class Registration {
 public:
  Registration() {
    if (!multiplies_slowly(at::kBFloat16) && !multiplies_slowly(at::kHalf)) return;
    struct Silent : c10::WarningHandler {
      void process(const c10::Warning&) override {}  // that kernels are replaced is on purpose
    } silent;
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    library_ = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    add<at::cpu::mm>("mm");
    add<at::cpu::mm_outf>("mm.out");
    add<at::cpu::addmm>("addmm");
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
    add<at::compositeexplicitautograd::convolution>("convolution");
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

}  // namespace

bool multiplies_slowly(at::ScalarType dtype) {
#if defined(__x86_64__)
  static const bool no_bfloat16 = __builtin_cpu_supports("avx512bf16") == 0;  // which those with AMX have, too
  static const bool no_float16 = __builtin_cpu_supports("avx512fp16") == 0;
  return (dtype == at::kBFloat16 && no_bfloat16) || (dtype == at::kHalf && no_float16);
#else
  return false;  // not measured
#endif
}

}  // namespace tessera
