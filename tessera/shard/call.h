// call: calls a module in such a way that the boundary of the call can be seen, because modules of libtorch have no hooks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "tessera/shard/activation.h"
#include "tessera/shard/tensors.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class ForwardPhase;
class Unit;

/// One call of a module's forward. As long as it exists, this thread is in the module's forward: clipping, steps and saves are errors.
class ForwardCall {
 public:
  explicit ForwardCall(const torch::nn::Module& module);
  ForwardCall(const ForwardCall&) = delete;
  ForwardCall& operator=(const ForwardCall&) = delete;
  ~ForwardCall();

  /// The input as the module wants it. Values without tensors are passed on as they are.
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
  /// Null if the module's activations are kept; see activation::checkpoint_module.
  const activation::Options* checkpointing() const { return checkpointing_.get(); }

 private:
  static void cast_tensor(at::Tensor& tensor, at::ScalarType dtype);
  template <class T>
  static T cast(T value, std::optional<at::ScalarType> dtype) {
    if (dtype) for_each_tensor_in(value, [&](at::Tensor& tensor) { cast_tensor(tensor, *dtype); });
    return value;
  }

  std::shared_ptr<const Unit> unit_;
  std::shared_ptr<const activation::Options> checkpointing_;
  std::optional<at::ScalarType> input_dtype_, output_dtype_;
  std::unique_ptr<ForwardPhase> phase_;
};

namespace detail {

struct NamesForward {
  void forward();
};
template <class M>
struct NamesForwardTwice : M, NamesForward {};

}  // namespace detail

/// Whether the class M has a forward, or several, or a template. ModuleList and ModuleDict have none. Of final classes it is assumed.
template <class M>
concept HasForward = std::is_final_v<M> || !requires { &detail::NamesForwardTwice<M>::forward; };

/// The shared_ptr of a module holder, or the shared_ptr that was given. It leads to a module that may be changed, as forward does.
template <class M>
auto pointer_of(const M& module) {
  if constexpr (requires { module.ptr(); }) {
    return module.ptr();
  } else {
    return module;
  }
}
template <class M>
using ModuleOf = std::remove_reference_t<decltype(*pointer_of(std::declval<const M&>()))>;

/// module->forward(inputs...), where `module` is a module holder or a shared_ptr. Floating-point inputs are cast to the param_dtype of the
/// module, unless its MixedPrecision::cast_forward_inputs is false, and floating-point outputs to its output_dtype. Tensors are found as
/// for_each_tensor_in finds them. For a module that fully_shard does not know, it is a plain call. A module that was given to
/// activation::checkpoint_module runs again in backward.
template <class M, class... Inputs>
auto call(const M& module, Inputs&&... inputs) {
  static_assert(HasForward<ModuleOf<M>>,
                "this module has no forward (as ModuleList and ModuleDict have none): call the modules in it one by one");
  const auto pointer = pointer_of(module);
  const ForwardCall boundary(*pointer);
  const auto forward = [pointer](auto&&... values) { return pointer->forward(std::forward<decltype(values)>(values)...); };
  const auto run = [&] {
    if constexpr ((std::is_copy_constructible_v<std::decay_t<Inputs>> && ...)) {
      if (const auto* options = boundary.checkpointing()) {
        const activation::detail::CallOf again{&*pointer, forward};
        return activation::checkpoint(*options, again, boundary.input(std::forward<Inputs>(inputs))...);
      }
    } else if (boundary.checkpointing() != nullptr) {
      activation::detail::refuse_inputs();
    }
    return forward(boundary.input(std::forward<Inputs>(inputs))...);
  };
  if constexpr (std::is_void_v<decltype(run())>) {
    run();
  } else {
    return boundary.output(run());
  }
}

}  // namespace tessera
