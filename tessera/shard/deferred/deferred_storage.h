// DeferredStorage: the storage of a tensor that has no values yet, on the meta device. It refers to the recorded operators that compute
// the values, if there are any.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>

#include "tessera/shard/storage/storage_tag.h"

namespace tessera {

class Tape;

class DeferredStorage final : public c10::StorageImpl {
 public:
  /// Takes the place of a storage on the meta device. `tape` is null if nothing was recorded for it.
  DeferredStorage(const c10::StorageImpl& meta, std::shared_ptr<Tape> tape, c10::Device device);
  ~DeferredStorage() override;

  void release_resources() override;

  std::shared_ptr<Tape> tape;
  size_t number = 0;                   // of its present values, on the tape
  const c10::Device device_of_values;  // where they will be
  /// The role of the tensor in its module. Free tensors get their values at their first use outside of deferred_init.
  enum class Kind { Free, Parameter, Buffer } kind = Kind::Free;
  std::string name;
  c10::Storage values;     // set once it has values, which other tensors over this storage have yet to take over
  bool abandoned = false;  // its values went into a unit, so that tensors which still have it are outdated

 private:
  /// Called when no tensor has this storage any more.
  void end();

  bool counted_ = true;
};
using DeferredStoragePtr = c10::intrusive_ptr<DeferredStorage>;

/// Null if the tensor is not deferred.
inline DeferredStorage* deferred_storage(const at::Tensor& tensor) {
  return tensor.defined() ? storage_as<DeferredStorage>(tensor) : nullptr;
}

namespace detail {
inline std::atomic<int> deferring = 0;  // deferred storages, and threads that record
}

/// Whether any tensor of the process is deferred or about to be.
inline bool may_be_deferred() {
  return detail::deferring.load(std::memory_order_relaxed) != 0;
}

}  // namespace tessera
