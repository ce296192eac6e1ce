// All differences between the supported versions of libtorch (2.11 to 2.14). No other file may check the version of the
// headers.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11
#error "Tessera needs libtorch 2.11 or newer"
#endif

namespace tessera::compat {

/// How the autograd engine holds its nodes: by shared_ptr in older versions, by intrusive_ptr in newer ones.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    // deleteNode releases long graphs without recursion. It is found by argument-dependent lookup, because newer versions lack it.
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

/// Returns a kind of thread-local debug information that only Tessera uses. `name` must last as long as the process. In older versions a
/// kind is a number, of which libtorch uses the first few and the last; in newer versions it is the address of a name.
template <class Kind = c10::DebugInfoKind>
constexpr Kind debug_info_kind(const std::string_view& name) {
  if constexpr (std::is_enum_v<Kind>) {
    constexpr int kOfNobodyElse = 0x54;
    return static_cast<Kind>(kOfNobodyElse);
  } else {
    return Kind(&name);
  }
}

namespace detail {

template <class Tag, typename Tag::Member kMember>
struct Expose {
  friend typename Tag::Member member(Tag) { return kMember; }
};

struct ReadGuard {
  using Member = bool c10::StorageImpl::*;
  friend Member member(ReadGuard);
};
struct WriteGuard {
  using Member = bool c10::StorageImpl::*;
  friend Member member(WriteGuard);
};

// libtorch's own functions either can't remove the guard that guard_storage() sets (2.11), or lose its message when they do. These explicit
// instantiations reach the private members, because access is not checked in them.
template struct Expose<ReadGuard, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct Expose<WriteGuard, &c10::StorageImpl::has_mutable_data_ptr_check_>;

}  // namespace detail

/// From now on, any access to the storage's memory throws an exception with this message.
inline void guard_storage(c10::StorageImpl& storage, std::string message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

/// Guards the storage again, with the message of the previous guard.
inline void guard_storage(c10::StorageImpl& storage) {
  storage.*member(detail::ReadGuard{}) = true;
  storage.*member(detail::WriteGuard{}) = true;
}

inline void unguard_storage(c10::StorageImpl& storage) {
  storage.*member(detail::ReadGuard{}) = false;
  storage.*member(detail::WriteGuard{}) = false;
}

namespace detail {

template <class Storage>
constexpr bool kTellsOfWrites = requires(Storage& storage, void (*told)(c10::StorageImpl*)) {
  storage.set_materializer(told);
};

}  // namespace detail

/// Whether a storage can report that an operator or a caller requests its memory for writing (since 2.13).
inline constexpr bool kTellsOfWrites = detail::kTellsOfWrites<c10::StorageImpl>;

/// Calls `told` once, at the next request for writing. Does nothing where kTellsOfWrites is false.
template <class Storage>
void tell_of_write(Storage& storage, void (*told)(c10::StorageImpl*)) {
  if constexpr (detail::kTellsOfWrites<Storage>) {
    if (storage.has_materializer()) storage.clear_materializer();
    storage.set_materializer(told);
  }
}

namespace detail {

template <class Tensor>
constexpr bool kHasGradDtype = requires(const Tensor& tensor) {
  tensor.set_grad_dtype(at::kFloat);
};

}  // namespace detail

/// Whether the gradient of a leaf may have another dtype than the leaf.
inline constexpr bool kHasGradDtype = detail::kHasGradDtype<at::TensorBase>;

/// Says which dtype the gradients of a leaf have. Does nothing where kHasGradDtype is false.
template <class Tensor>
void set_grad_dtype(const Tensor& leaf, at::ScalarType dtype) {
  if constexpr (kHasGradDtype) leaf.set_grad_dtype(dtype);
}

}  // namespace tessera::compat
