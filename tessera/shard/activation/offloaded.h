// Offloaded: values of a tensor in host memory or on disk, until backward needs them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/shard/activation/tensor_version.h"
#include "tessera/shard/activation_options.h"

namespace tessera::activation {

class Offloaded {
 public:
  /// Begins to copy the values. The tensor's memory is released when they are copied.
  static std::shared_ptr<Offloaded> make(const at::Tensor& tensor, const Options& options);

  explicit Offloaded(const at::Tensor& tensor) : storage_(storage_of(tensor)) {}
  Offloaded(const Offloaded&) = delete;
  Offloaded& operator=(const Offloaded&) = delete;
  virtual ~Offloaded() = default;

  /// The values on the tensor's device.
  virtual at::Tensor get() = 0;
  /// Waits until the values are copied.
  virtual void finish() = 0;
  bool is_of(const c10::StorageImpl* storage) const { return storage == storage_; }

 private:
  const c10::StorageImpl* const storage_;  // only compared
};

/// Whether the values belong where the options say. Those of leaves do not: the program keeps them anyway. Of the fraction of the bytes
/// that goes to disk, whole tensors do.
bool should_offload(const at::Tensor& tensor, const Options& options);

}  // namespace tessera::activation
