// Paged tensors: tensors with the paging key, so that every operator on them runs through the fallback in paging/paging.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/base/paging_key.h"

namespace tessera {

class Unit;

inline bool is_paged(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kPagingKey);
}

/// A flat tensor over a complete storage, without the paging key and with a version counter of its own. For internal use: operators on it
/// are not paged.
at::Tensor flat_view(const c10::Storage& storage, at::ScalarType dtype);

/// A paged tensor over a part of a storage.
at::Tensor paged_view(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);
/// A paged tensor with the sizes, strides and offset of the paged tensor `like`. The storage must be on the same device.
at::Tensor paged_view(const c10::Storage& storage, const at::Tensor& like, at::ScalarType dtype);
/// A paged tensor over the same memory as `tensor`.
at::Tensor paged_alias(const at::Tensor& tensor);

/// Returns a hash of a view's offset and size. The hashes of different shards in one storage differ.
inline uint64_t place_hash(const at::Tensor& view) {
  const auto place = static_cast<uint64_t>(view.storage_offset()) << 20 ^ static_cast<uint64_t>(view.numel());
  return (place + 1) * 0x9e3779b97f4a7c15ULL ^ place >> 7;
}

/// Attached to a local value: the parameter from whose shard it was computed. Shards and their gradients have a storage tag instead.
struct SourceParameter final : c10::BackendMeta {
  SourceParameter(const std::shared_ptr<Unit>& unit, size_t group, size_t parameter) : unit(unit), group(group), parameter(parameter) {}

  const std::weak_ptr<Unit> unit;
  const size_t group;
  const size_t parameter;  // index in the group
};
using SourceParameterPtr = c10::intrusive_ptr<SourceParameter>;

}  // namespace tessera
