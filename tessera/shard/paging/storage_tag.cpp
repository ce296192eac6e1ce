#include "tessera/shard/paging/storage_tag.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <cstring>
#include <typeinfo>
#include <utility>

#include "tessera/base/compat.h"
#include "tessera/base/env.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

/// The tag lies beside the pointer to the memory, not in it: others may ask whose storage this is while the memory comes or goes.
struct TaggedStorage final : c10::StorageImpl {
  TaggedStorage(StorageTag content, size_t bytes, c10::Device device)
      : StorageImpl(use_byte_size_t(), bytes, at::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false),
        tag(std::move(content)) {}

  // The last tensor is gone. Weak references may remain, the unit's own among them.
  void release_resources() override {
    StorageImpl::release_resources();
    tag = {};
  }

  StorageTag tag;
};

/// Puts the tag's memory, or its lack, in front of the storage.
void show_memory(c10::StorageImpl& storage) {
  const auto& memory = tag_of(storage)->memory;
  storage.set_data_ptr_noswap(at::DataPtr(memory ? memory->get() : nullptr, storage.device()));
}

at::Tensor view_of(const c10::Storage& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype, at::IntArrayRef sizes,
                   at::IntArrayRef strides, int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

}  // namespace

StorageTag* tag_of(c10::StorageImpl& storage) {
  return typeid(storage) == typeid(TaggedStorage) ? &static_cast<TaggedStorage&>(storage).tag : nullptr;
}

StorageTag* tag_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tag_of(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()) : nullptr;
}

c10::Storage tagged_storage(Role role, const std::shared_ptr<Unit>& unit, size_t group, size_t bytes, c10::Device device) {
  StorageTag tag{.role = role, .unit = unit, .group = group, .owner = role == Role::Unsharded ? unit : nullptr, .memory = {}};
  return c10::Storage(c10::make_intrusive<TaggedStorage>(std::move(tag), bytes, device));
}

std::shared_ptr<at::DataPtr> allocate(size_t bytes, c10::Device device) {
  return std::make_shared<at::DataPtr>(c10::GetAllocator(device.type())->allocate(bytes));
}

void fill(c10::StorageImpl& storage) {
  lend(storage, allocate(storage.nbytes(), storage.device()));
  tag_of(storage)->lent = false;
}

void lend(c10::StorageImpl& storage, std::shared_ptr<at::DataPtr> memory) {
  compat::unguard_storage(storage);
  auto& tag = *tag_of(storage);
  tag.memory = std::move(memory);
  tag.lent = true;
  show_memory(storage);
}

bool is_lent(const c10::StorageImpl& storage) {
  return tag_of(const_cast<c10::StorageImpl&>(storage))->lent;
}

void drain(c10::StorageImpl& storage) {
  // Whoever still reads through a raw pointer sees NaN before the memory belongs to somebody else.
  static const bool poison = env_int("TESSERA_POISON", 0, 1).value_or(0) == 1;
  auto& tag = *tag_of(storage);
  if (poison && storage.device_type() == c10::kCPU && tag.memory && !tag.lent) {
    std::memset(tag.memory->get(), 0xFF, storage.nbytes());
  }
  tag.memory.reset();
  show_memory(storage);
  compat::guard_storage(storage);
}

void explain(c10::StorageImpl& storage, std::string why_no_memory) {
  compat::guard_storage(storage, std::move(why_no_memory));
  if (tag_of(storage)->memory) compat::unguard_storage(storage);
}

void close(c10::StorageImpl& storage) {
  compat::guard_storage(storage);
}

void open(c10::StorageImpl& storage) {
  compat::unguard_storage(storage);
}

void watch(c10::StorageImpl& shards) {
  compat::tell_of_write(shards, [](c10::StorageImpl* written) {
    // Operators have announced themselves, and so do we.
    if (c10::impl::tls_is_dispatch_key_excluded(kPagingKey)) return;
    const auto unit = tag_of(*written)->unit.lock();
    if (unit) unit->schedule()->hand_out_pointer(*unit);
  });
}

void remember_squares(c10::StorageImpl& gradient, double squares) {
  if (!compat::kTellsOfWrites) return;
  tag_of(gradient)->squares = squares;
  compat::tell_of_write(gradient, [](c10::StorageImpl* written) { tag_of(*written)->squares.reset(); });
}

at::Tensor memory_view(const c10::StorageImpl& storage, at::ScalarType dtype) {
  auto keeper = std::make_unique<std::shared_ptr<at::DataPtr>>(tag_of(const_cast<c10::StorageImpl&>(storage))->memory);
  auto* const memory = (*keeper)->get();
  at::DataPtr data(memory, keeper.release(), [](void* kept) { delete static_cast<std::shared_ptr<at::DataPtr>*>(kept); }, storage.device());
  return flat_view(
      c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data),
                                                         /*allocator=*/nullptr, /*resizable=*/false)),
      dtype);
}

at::Tensor flat_view(const c10::Storage& storage, at::ScalarType dtype) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / c10::elementSize(dtype));
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device())).set_(storage, 0, {numel}, {1});
}

at::Tensor paged_view(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  const auto plain = at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device()));
  return view_of(storage, plain.key_set().add(kPagingKey), plain.dtype(), sizes, strides, offset);
}

at::Tensor paged_alias(const at::Tensor& tensor) {
  return view_of(tensor.storage(), tensor.key_set().add(kPagingKey), tensor.dtype(), tensor.sizes(), tensor.strides(),
                 tensor.storage_offset());
}

at::Tensor paged_view(const c10::Storage& storage, const at::Tensor& like) {
  return view_of(storage, like.key_set(), like.dtype(), like.sizes(), like.strides(), like.storage_offset());
}

}  // namespace tessera
