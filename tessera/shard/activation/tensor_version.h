// How to find out whether a tensor is the one that it was: its memory, the version that libtorch counts up with each change in place, and
// a digest of its values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

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

/// A tensor over the same memory, without a graph, that shares its version.
at::Tensor detached(const at::Tensor& tensor);

/// Of large tensors only pieces are looked at, evenly spread. Nothing for a tensor whose memory can't be read here: that of a device or of
/// a unit.
std::optional<uint64_t> digest_of(const at::Tensor& tensor);

/// The errors of a segment that can't recompute, because something was changed, and of one whose recomputation is not what forward was.
[[noreturn]] void refuse_change(std::string_view of_what);
[[noreturn]] void refuse_difference(std::string_view what,
                                    std::string_view advice = "it must depend on nothing but its inputs and parameters");

}  // namespace tessera::activation
