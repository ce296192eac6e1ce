// The memory of a tensor, and the version that libtorch counts up with each change in place.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

#include "tessera/base/paging_key.h"

namespace tessera::activation {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Null for a tensor that has none, such as a sparse one.
c10::StorageImpl* storage_of(const at::Tensor& tensor);
WeakStorage weak_storage_of(const at::Tensor& tensor);

/// Of a tensor that counts no changes, 0.
uint32_t version_of(const at::Tensor& tensor);
/// Throws UsageError if the tensor, which a segment needs to recompute, has another version.
void expect_version(const at::Tensor& tensor, uint32_t version);

/// Work on tensors that is no part of what the program does: neither paging nor autograd sees it.
struct Unrecorded {
  const c10::impl::ExcludeDispatchKeyGuard unpaged{kPagingKey};
  const c10::AutoGradMode no_grad{false};
};

/// A tensor over the same memory, without a graph, that shares its version.
at::Tensor detached(const at::Tensor& tensor);

}  // namespace tessera::activation
