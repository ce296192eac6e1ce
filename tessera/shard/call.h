// call: calls a module so that Tessera sees where the call begins and ends, because modules of libtorch have no hooks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "tessera/base/no_copy.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/tensors.h"

namespace torch::nn {
class Module;
class SequentialImpl;
}  // namespace torch::nn

namespace tessera {

class Unit;
struct Boundary;

/// One call of a module's forward: casts its inputs and outputs. As long as the object exists, clipping, steps and saves on this thread are
/// errors.
class ForwardCall : NoCopy {
 public:
  explicit ForwardCall(const torch::nn::Module& module);
  ~ForwardCall();

  /// Casts an input to the dtype that the module takes. Values without tensors are passed on as they are.
  template <class T>
  decltype(auto) input(T&& value) const {
    if constexpr (kHasTensors<T>) {
      return cast(std::remove_cvref_t<T>(std::forward<T>(value)), input_dtype_);
    } else {
      return std::forward<T>(value);
    }
  }
  template <class T>
  T output(T value) const {
    return cast(std::move(value), output_dtype_);
  }
  /// The options that activation::checkpoint_module has set for the module; null if checkpoint_module was not called.
  const activation::Options* checkpointing() const { return checkpointing_.get(); }

 private:
  ForwardCall(const torch::nn::Module& module, const Boundary& boundary);
  static void cast_tensor(at::Tensor& tensor, at::ScalarType dtype);
  template <class T>
  static T cast(T value, std::optional<at::ScalarType> dtype) {
    if (dtype) for_each_tensor_in(value, [&](at::Tensor& tensor) { cast_tensor(tensor, *dtype); });
    return value;
  }

  const std::shared_ptr<const Unit> unit_;
  const ForwardPhase phase_;
  const std::shared_ptr<const activation::Options> checkpointing_;
  const std::optional<at::ScalarType> input_dtype_, output_dtype_;
};

namespace detail {

struct NamesForward {
  void forward();
};
template <class M>
struct NamesForwardTwice : M, NamesForward {};

}  // namespace detail

/// Whether the class M has a forward, be it overloaded or a template. ModuleList and ModuleDict have none. Final classes are assumed to
/// have one.
template <class M>
concept HasForward = std::is_final_v<M> || !requires { &detail::NamesForwardTwice<M>::forward; };

namespace detail {

/// Throws UsageError if `module` is null, or no shared_ptr owns it.
std::shared_ptr<torch::nn::Module> owner_of(torch::nn::Module* module);
/// Computes sequential->forward(x). Calls the modules in it as tessera::call does if they were given to fully_shard or checkpoint_module.
at::Tensor forward_each(torch::nn::SequentialImpl& sequential, at::Tensor x);

}  // namespace detail

/// Returns the shared_ptr of a module holder, the owner of a module given by its address, or the given shared_ptr. The module is not const,
/// because forward may change it.
template <class M>
auto pointer_of(const M& module) {
  if constexpr (requires { module.ptr(); }) {
    return module.ptr();
  } else if constexpr (std::is_pointer_v<M>) {
    return std::shared_ptr<std::remove_pointer_t<M>>(detail::owner_of(module), module);
  } else {
    return module;
  }
}
template <class M>
using ModuleOf = std::remove_reference_t<decltype(*pointer_of(std::declval<const M&>()))>;

/// Like call(module, inputs...) below, with forward(*module, inputs...) in place of module->forward(inputs...).
template <class M, class Forward, class... Inputs>
auto call_with(const M& module, const Forward& forward, Inputs&&... inputs) {
  const auto pointer = pointer_of(module);
  const ForwardCall boundary(*pointer);
  const auto run = [&] {
    if constexpr ((std::is_copy_constructible_v<std::decay_t<Inputs>> && ...)) {
      if (const auto* options = boundary.checkpointing()) {
        const auto again = [pointer, forward](auto&&... values) { return forward(*pointer, std::forward<decltype(values)>(values)...); };
        return activation::checkpoint(*options, activation::detail::CallOf{&*pointer, again},
                                      boundary.input(std::forward<Inputs>(inputs))...);
      }
    } else if (boundary.checkpointing() != nullptr) {
      activation::detail::refuse_inputs();
    }
    return forward(*pointer, boundary.input(std::forward<Inputs>(inputs))...);
  };
  if constexpr (std::is_void_v<decltype(run())>) {
    run();
  } else {
    return boundary.output(run());
  }
}

/// Calls module->forward(inputs...), where `module` is a module holder, a shared_ptr, or the address of a module that a shared_ptr owns,
/// such as `each->as<Block>()` of a ModuleList. Floating-point inputs are cast to the param_dtype of the module, unless its
/// MixedPrecision::cast_forward_inputs is false, and floating-point outputs to its output_dtype. Tensors are found as for_each_tensor_in
/// finds them. A module that was given to activation::checkpoint_module runs again in backward. For a module that was given neither to
/// checkpoint_module nor to fully_shard, this is a plain call. If the module is a Sequential and the input one tensor, the modules in it
/// are called in the same way.
template <class M, class... Inputs>
auto call(const M& module, Inputs&&... inputs) {
  using Module = ModuleOf<M>;
  static_assert(HasForward<Module>, "this module has no forward, as ModuleList and ModuleDict have none: call the modules in it one by one");
  if constexpr (std::is_same_v<Module, torch::nn::SequentialImpl> && sizeof...(Inputs) == 1 &&
                (std::is_same_v<std::remove_cvref_t<Inputs>, at::Tensor> && ...)) {
    return call_with(module, detail::forward_each, std::forward<Inputs>(inputs)...);
  } else {
    const auto forward = [](Module& self, auto&&... values) { return self.forward(std::forward<decltype(values)>(values)...); };
    return call_with(module, forward, std::forward<Inputs>(inputs)...);
  }
}

/// A module holder whose calls Tessera sees: with `Called<torch::nn::Linear> linear`, linear(x) is tessera::call(linear, x).
template <class Holder>
struct Called : Holder {
  using Holder::Holder;
  template <class... Inputs>
  auto operator()(Inputs&&... inputs) const {
    return call(static_cast<const Holder&>(*this), std::forward<Inputs>(inputs)...);
  }
};

}  // namespace tessera
