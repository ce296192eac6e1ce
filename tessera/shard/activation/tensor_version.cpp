#include "tessera/shard/activation/tensor_version.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"

namespace tessera::activation {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

WeakStorage weak_storage_of(const at::Tensor& tensor) {
  return WeakStorage(tensor.storage().getWeakStorageImpl());
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

void expect_version(const at::Tensor& tensor, uint32_t version) {
  if (version_of(tensor) == version) return;
  throw UsageError(fmt::format(
      "a {} tensor of shape [{}] that a checkpointed segment needs to run again was changed in place between forward and backward, "
      "by a step of an optimizer or an operator such as add_; run backward first, or change a copy",
      c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", ")));
}

at::Tensor detached(const at::Tensor& tensor) {
  const Unrecorded unrecorded;
  return tensor.detach();
}

}  // namespace tessera::activation
