// Offloaded: values of a tensor in host memory or on disk, until backward needs them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/shard/activation_options.h"

namespace tessera::activation {

class Offloaded {
 public:
  /// Copies the values. What goes to disk is written by the system while forward goes on. On a device, the copy is queued after what has
  /// made the values.
  static std::shared_ptr<const Offloaded> make(const at::Tensor& tensor, const Options& options);

  /// The values on the tensor's device.
  at::Tensor get() const;
  /// Whether the values were those in this memory.
  bool is_of(const c10::StorageImpl* storage) const { return storage == storage_; }

 private:
  Offloaded(const at::Tensor& tensor, at::Tensor values, std::shared_ptr<const Offloaded> before);

  const c10::StorageImpl* const storage_;  // only compared
  const c10::Device device_;
  const at::Tensor values_;
  const std::weak_ptr<const Offloaded> before_;  // what backward needs after this
};

/// Whether the values belong where the options say. Those of leaves do not: the program keeps them anyway. Of the fraction of the bytes
/// that goes to disk, whole tensors do.
bool should_offload(const at::Tensor& tensor, const Options& options);

}  // namespace tessera::activation
