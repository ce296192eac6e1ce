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
  size_t number = 0;                   // the number on the tape of the storage's present values
  const c10::Device device_of_values;  // the device on which the values will be
  /// The role of the tensor in its module. Free tensors get their values at their first use outside of deferred_init.
  enum class Kind { Free, Parameter, Buffer } kind = Kind::Free;
  std::string name;
  c10::Storage values;     // set once a tensor over this storage has got its values; other tensors over it take them at their next use
  bool abandoned = false;  // the values have gone into a unit or another form, so tensors that still have this storage are outdated

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
inline std::atomic<int> deferring = 0;  // number of deferred storages and of recordings
}

/// Whether any tensor of the process is deferred or about to be.
inline bool may_be_deferred() {
  return detail::deferring.load(std::memory_order_relaxed) != 0;
}

}  // namespace tessera
