// Tensors whose operators come to paging first, because they carry its key.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/base/paging_key.h"

namespace tessera {

class Unit;

inline bool is_paged(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kPagingKey);
}

/// A flat tensor over all of a storage, with a version counter of its own and without the key: for work below the surface.
at::Tensor flat_view(const c10::Storage& storage, at::ScalarType dtype);

/// A tensor with the key over a part of a storage.
at::Tensor paged_view(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);
/// The same, at the place that another paged tensor has in a storage of the same device.
at::Tensor paged_view(const c10::Storage& storage, const at::Tensor& like);
/// The same values with the key.
at::Tensor paged_alias(const at::Tensor& tensor);

/// Tells the views of one storage apart.
inline uint64_t place_hash(const at::Tensor& view) {
  const auto place = static_cast<uint64_t>(view.storage_offset()) << 20 ^ static_cast<uint64_t>(view.numel());
  return (place + 1) * 0x9e3779b97f4a7c15ULL ^ place >> 7;
}

/// Says which parameter's shard the values of a tensor were computed from, where its storage does not.
struct Origin final : c10::BackendMeta {
  Origin(const std::shared_ptr<Unit>& unit, size_t group, size_t parameter) : unit(unit), group(group), parameter(parameter) {}

  const std::weak_ptr<Unit> unit;
  const size_t group;
  const size_t parameter;  // in the group
};
using OriginPtr = c10::intrusive_ptr<Origin>;

}  // namespace tessera
