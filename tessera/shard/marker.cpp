#include "tessera/shard/marker.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <cstring>

#include "tessera/base/compat.h"

namespace tessera {
namespace {

void delete_marker(void* context) {
  delete static_cast<Marker*>(context);
}

Marker* marker_of(c10::StorageImpl& storage) {
  const auto& data = storage._mutable_data_ptr_no_checks();
  return data.get_deleter() == &delete_marker ? static_cast<Marker*>(data.get_context()) : nullptr;
}

/// Puts the marker's memory, or its lack, in front of the storage.
void show_memory(c10::StorageImpl& storage) {
  auto& data = storage._mutable_data_ptr_no_checks();
  auto* marker = static_cast<Marker*>(data.release_context());
  storage.set_data_ptr_noswap(at::DataPtr(marker->memory.get(), marker, &delete_marker, data.device()));
}

}  // namespace

Marker* marker_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  return marker_of(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

c10::Storage marked_storage(Role role, const std::shared_ptr<Unit>& unit, size_t bytes, c10::Device device, Allocate when) {
  auto marker = std::make_unique<Marker>(Marker{.role = role, .unit = unit, .owner = role == Role::Full ? unit : nullptr, .memory = {}});
  at::DataPtr data(nullptr, marker.release(), &delete_marker, device);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                                             /*allocator=*/nullptr, /*resizable=*/false));
  if (when == Allocate::Now) fill(*storage.unsafeGetStorageImpl());
  return storage;
}

void fill(c10::StorageImpl& storage) {
  auto* marker = marker_of(storage);
  compat::unguard_storage(storage);
  marker->memory = c10::GetAllocator(storage.device_type())->allocate(storage.nbytes());
  show_memory(storage);
}

void drain(c10::StorageImpl& storage, const std::string& message) {
#ifdef TESSERA_POISON
  // Whoever still reads through a raw pointer sees NaN before the memory belongs to somebody else.
  if (storage.device_type() == c10::kCPU && marker_of(storage)->memory)
    std::memset(marker_of(storage)->memory.get(), 0xFF, storage.nbytes());
#endif
  marker_of(storage)->memory.clear();
  show_memory(storage);
  compat::guard_storage(storage, message);
}

at::Tensor flat_view(const c10::Storage& storage, at::ScalarType dtype) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / c10::elementSize(dtype));
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device())).set_(storage, 0, {numel}, {1});
}

at::Tensor paged_view(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  const auto plain = at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device()));
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), plain.key_set().add(kPagingKey), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

}  // namespace tessera
