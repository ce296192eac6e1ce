// Every difference between the libtorch versions that Tessera builds on (2.11 to 2.14). Nothing else may ask for the version.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11
#error "Tessera needs libtorch 2.11 or newer"
#endif

namespace tessera::compat {

/// How the autograd engine holds its nodes: a shared_ptr until 2.12, an intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    // torch::autograd::deleteNode, found by its argument: newer versions lack it. It unwinds long graphs without recursion.
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
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

// 2.11 can set the guard below but offers no call to lift it. An explicit instantiation may name private members.
template struct Expose<ReadGuard, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct Expose<WriteGuard, &c10::StorageImpl::has_mutable_data_ptr_check_>;

template <class Storage>
void lift_guard(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    storage.*member(ReadGuard{}) = false;
    storage.*member(WriteGuard{}) = false;
  }
}

}  // namespace detail

/// From now on whoever asks the storage for its memory gets an exception with this message.
inline void guard_storage(c10::StorageImpl& storage, std::string message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

inline void unguard_storage(c10::StorageImpl& storage) {
  detail::lift_guard(storage);
}

}  // namespace tessera::compat
