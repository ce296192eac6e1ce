// Stowed: values of a tensor on the host or on disk, until backward needs them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/shard/activation.h"

namespace tessera::activation {

class Stowed {
 public:
  /// Begins to copy the values. The tensor's memory is released when they are copied.
  static std::shared_ptr<Stowed> make(const at::Tensor& tensor, const Options& options);

  explicit Stowed(const at::Tensor& tensor) : storage_(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()) {}
  Stowed(const Stowed&) = delete;
  Stowed& operator=(const Stowed&) = delete;
  virtual ~Stowed() = default;

  /// The values on the tensor's device.
  virtual at::Tensor get() = 0;
  /// Waits until the values are copied.
  virtual void finish() = 0;
  bool is_of(const c10::StorageImpl* storage) const { return storage == storage_; }

 private:
  const c10::StorageImpl* const storage_;  // only compared
};

/// Whether the values are to be where the options say. Those of leaves are not: the program keeps them anyway. Of the fraction of the bytes
/// that goes to disk, whole tensors do.
bool is_stowed(const at::Tensor& tensor, const Options& options);

}  // namespace tessera::activation
