#include "tessera/shard/activation/offloaded.h"

#include <ATen/ATen.h>

#include <utility>

#include "tessera/base/error.h"
#include "tessera/shard/activation/tensor_version.h"
#include "tessera/shard/storage/paged_tensor.h"

namespace tessera::activation {
namespace {

at::Tensor empty_on_disk(const at::Tensor& like, const DiskMemoryOptions& options) {
  auto memory = allocate_on_disk(like.nbytes(), {.folder = options.folder}, "activations (activation::Options::disk)");
  const c10::Storage storage(c10::Storage::use_byte_size_t(), like.nbytes(), std::move(memory), nullptr, false);
  return at::empty({0}, like.options().device(at::kCPU)).set_(storage, 0, like.sizes(), like.strides());
}

at::Tensor empty_on_host(const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCPU).pinned_memory(like.is_cuda()));
}

}  // namespace

Offloaded::Offloaded(const at::Tensor& tensor, at::Tensor values, std::shared_ptr<const Offloaded> before)
    : storage_(storage_of(tensor)), device_(tensor.device()), values_(std::move(values)), before_(std::move(before)) {}

std::shared_ptr<const Offloaded> Offloaded::make(const at::Tensor& tensor, const Options& options) {
  const Unrecorded unrecorded;
  const bool to_disk = options.offload == OffloadTo::Disk;
  const auto values = to_disk ? empty_on_disk(tensor, options.disk) : empty_on_host(tensor);
  values.copy_(tensor, /*non_blocking=*/!to_disk);
  evict_pages(values.const_data_ptr(), values.nbytes());
  thread_local std::weak_ptr<const Offloaded> last;
  const std::shared_ptr<const Offloaded> made(new Offloaded(tensor, values, last.lock()));
  last = made;
  return made;
}

at::Tensor Offloaded::get() const {
  if (const auto before = before_.lock()) read_pages_ahead(before->values_.const_data_ptr(), before->values_.nbytes());
  const Unrecorded unrecorded;
  return values_.to(device_, /*non_blocking=*/true);
}

bool should_offload(const at::Tensor& tensor, const Options& options) {
  if (options.offload == OffloadTo::Nowhere || (options.offload == OffloadTo::Host && tensor.is_cpu())) return false;
  if (is_paged(tensor) || (tensor.is_leaf() && tensor.requires_grad()) || !tensor.has_storage()) return false;
  if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return false;
  if (options.offload != OffloadTo::Disk || options.disk.fraction == 1) return true;
  thread_local double owed = 0;  // bytes that should be on disk for the fraction, and are not yet
  owed += options.disk.fraction * static_cast<double>(tensor.nbytes());
  if (owed < static_cast<double>(tensor.nbytes())) return false;
  owed -= static_cast<double>(tensor.nbytes());
  return true;
}

}  // namespace tessera::activation
