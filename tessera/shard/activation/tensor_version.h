// Tells whether a tensor has changed, by its memory, by the version that libtorch counts up with each change in place, and by a digest of
// its values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "tessera/base/paging_key.h"
#include "tessera/shard/storage/storage_tag.h"

namespace tessera::activation {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

WeakStorage weak_storage_of(const at::Tensor& tensor);

/// Returns libtorch's version of the tensor; 0 for an inference tensor, which has none.
uint32_t version_of(const at::Tensor& tensor);
/// Throws UsageError if the tensor, which a segment needs to recompute, has another version than `version`.
void expect_version(const at::Tensor& tensor, uint32_t version);

/// Returns a tensor over the same memory, without a graph, that shares the version of `tensor`.
at::Tensor detached(const at::Tensor& tensor);

/// Returns a hash of the values; for a large tensor, a hash of evenly spread pieces. Returns nothing if the memory can't be read here,
/// because it belongs to a device or a unit.
std::optional<uint64_t> digest_of(const at::Tensor& tensor);

/// Throw UsageError: refuse_change() if a segment can't recompute because a tensor was changed, refuse_difference() if a recomputation
/// differs from forward.
[[noreturn]] void refuse_change(std::string_view of_what);
[[noreturn]] void refuse_difference(std::string_view what,
                                    std::string_view advice = "it must depend only on its inputs and parameters");

}  // namespace tessera::activation
