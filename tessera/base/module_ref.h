// A module as functions take it: the module itself, a shared_ptr to it, or a module holder, such as torch::nn::Linear.
#pragma once

#include <concepts>

namespace torch::nn {
class Module;
}

namespace tessera {

namespace detail {

/// Throws UsageError: a function was given an empty holder, or a null pointer.
[[noreturn]] void refuse_no_module();

template <class T>
concept Holder = requires(const T& holder) { holder.ptr(); } || requires(const T& holder) {
  holder.get();
  holder.use_count();
};

template <Holder T>
auto* module_in(const T& holder) {
  if constexpr (requires { holder.is_empty(); }) {
    return holder.is_empty() ? nullptr : &*holder.ptr();
  } else if constexpr (requires { holder.ptr(); }) {
    return &*holder.ptr();
  } else {
    return holder.get();
  }
}

}  // namespace detail

/// A type for parameters of functions. It does not keep the module alive. Functions that change nothing take a ConstModuleRef.
template <class Module>
class BasicModuleRef {
 public:
  BasicModuleRef(Module& module) : module_(&module) {}  // NOLINT(google-explicit-constructor)
  /// Throws UsageError if the holder is empty.
  template <detail::Holder T>
    requires requires(const T& holder) {
      { detail::module_in(holder) } -> std::convertible_to<Module*>;
    }
  BasicModuleRef(const T& holder) : module_(detail::module_in(holder)) {  // NOLINT(google-explicit-constructor)
    if (module_ == nullptr) detail::refuse_no_module();
  }
  template <class Other>
    requires std::convertible_to<Other*, Module*>
  BasicModuleRef(const BasicModuleRef<Other>& other) : module_(&*other) {}  // NOLINT(google-explicit-constructor)

  Module& operator*() const { return *module_; }
  Module* operator->() const { return module_; }
  operator Module&() const { return *module_; }  // NOLINT(google-explicit-constructor)

 private:
  Module* module_;
};

using ModuleRef = BasicModuleRef<torch::nn::Module>;
using ConstModuleRef = BasicModuleRef<const torch::nn::Module>;

}  // namespace tessera
