#include "tessera/shard/deferred/values.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/weight_forms.h"

namespace tessera {

namespace {

/// Gives the tensor the memory of `values`, and keeps its autograd metadata. set_data would refuse another device.
void take_memory(const at::Tensor& tensor, const at::Tensor& values) {
  const auto& own = has_stand_in(tensor) ? paged_alias(values) : values;  // so that paging still sees the weight's operators
  tensor.unsafeGetTensorImpl()->shallow_copy_from(own.getIntrusivePtr());
}

}  // namespace

void for_each_named(const torch::nn::Module& module,
                    c10::function_ref<void(const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name)> visit) {
  for (const auto& item : module.named_parameters()) visit(item.value(), DeferredStorage::Kind::Parameter, item.key());
  for (const auto& item : module.named_buffers()) visit(item.value(), DeferredStorage::Kind::Buffer, item.key());
}

TapeTensor on_tape(const at::Tensor& tensor, const DeferredStorage& storage) {
  return {tensor, storage.number, storage.nbytes(), storage.device_of_values};
}

void put_into(const at::Tensor& tensor, const DeferredStoragePtr& storage) {
  const auto view = paged_view(c10::Storage(storage), tensor.scalar_type(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
  tensor.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
}

bool lacks_values(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_meta();
}

bool has_recipe(const at::Tensor& tensor) {
  const auto* const storage = deferred_storage(tensor);
  return storage != nullptr && storage->tape != nullptr;
}

c10::Device device_of_values(const at::Tensor& tensor, c10::Device otherwise) {
  const auto* const storage = deferred_storage(tensor);
  return storage != nullptr ? storage->device_of_values : tensor.is_meta() ? otherwise : tensor.device();
}

at::Tensor computed_values(const at::Tensor& tensor) {
  const auto& storage = *deferred_storage(tensor);
  return storage.tape->replay(on_tape(tensor, storage));
}

bool has_parts(const at::Tensor& tensor) {
  const auto* const storage = deferred_storage(tensor);
  return storage != nullptr && storage->tape != nullptr && storage->tape->is_seeded() &&
         storage->tape->has_parts(on_tape(tensor, *storage));
}

at::Tensor computed_values(const at::Tensor& tensor, const ValueRange& range) {
  const auto& storage = *deferred_storage(tensor);
  return storage.tape->replay(on_tape(tensor, storage), range);
}

uint64_t fingerprint_of_recipe(const at::Tensor& tensor) {
  const auto& storage = *deferred_storage(tensor);
  return storage.tape->fingerprint(on_tape(tensor, storage));
}

void initialise(const InitFunction& init, const std::string& name, const at::Tensor& values) {
  const auto own = values.detach();
  auto given = own;
  init(name, given);
  if (!given.defined() || given.sizes() != values.sizes()) {
    const auto shape = given.defined() ? fmt::format("a tensor of [{}]", fmt::join(given.sizes(), ", ")) : "an undefined tensor";
    throw UsageError("param_init_fn gave {} for '{}', which has the shape [{}]; fill the values in place", shape, name,
                     joined(values.sizes()));
  }
  const c10::AutoGradMode no_grad(false);
  if (!given.is_same(own) || !given.is_alias_of(values) || given.strides() != values.strides()) at::Tensor(values).copy_(given);
}

namespace {

/// Copies the whole storage to the device, because other tensors may have views of it, and returns the same view of the copy.
at::Tensor moved(const at::Tensor& values, c10::Device device) {
  const auto bytes = at::empty({0}, at::TensorOptions(at::kCPU).dtype(at::kByte)).set_(values.storage()).to(device);
  return at::empty({0}, at::TensorOptions(device).dtype(values.scalar_type()))
      .set_(bytes.storage(), values.storage_offset(), values.sizes(), values.strides());
}

}  // namespace

void give_values(const at::Tensor& tensor, const at::Tensor& values) {
  const BelowPaging below;
  if (auto* const storage = deferred_storage(tensor)) storage->values = values.storage();
  take_memory(tensor, values.detach());
}

bool follow_values(const at::Tensor& tensor) {
  const auto* const storage = deferred_storage(tensor);
  if (storage == nullptr || !storage->values) return false;
  const BelowPaging below;
  const c10::Storage values = storage->values;
  const auto view = at::empty({0}, at::TensorOptions(values.device()).dtype(tensor.scalar_type()))
                        .set_(values, tensor.storage_offset(), tensor.sizes(), tensor.strides());
  take_memory(tensor, view);
  return true;
}

void allocate_values(const at::Tensor& tensor, c10::Device otherwise) {
  const BelowPaging below;
  if (follow_values(tensor)) return;
  const auto device = device_of_values(tensor, otherwise);
  if (auto* const storage = deferred_storage(tensor)) {
    storage->values = at::empty({static_cast<int64_t>(storage->nbytes())}, at::TensorOptions(device).dtype(at::kByte)).storage();
    follow_values(tensor);
  } else {
    give_values(tensor, at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device)));
  }
}

bool materialize(const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name, const InitFunction& init,
                 c10::Device otherwise) {
  if (!lacks_values(tensor) || follow_values(tensor)) return true;
  if (has_recipe(tensor) && (!init || kind != DeferredStorage::Kind::Parameter)) {
    const auto values = computed_values(tensor);
    // No other tensor needs the values on the CPU.
    give_values(tensor, values.is_cpu() && !otherwise.is_cpu() ? moved(values, otherwise) : values);
  } else if (init) {
    allocate_values(tensor, otherwise);
    initialise(init, name, tensor);
  } else {
    expect_values_later(tensor, kind, name, otherwise);
    return false;
  }
  return true;
}

void expect_values_later(const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name, c10::Device device) {
  const BelowPaging below;
  if (deferred_storage(tensor) != nullptr) return;
  const auto storage = c10::make_intrusive<DeferredStorage>(*tensor.storage().unsafeGetStorageImpl(), nullptr, device);
  storage->kind = kind;
  storage->name = name;
  put_into(tensor, storage);
}

void abandon_values(const at::Tensor& tensor) {
  if (auto* const storage = deferred_storage(tensor)) storage->abandoned = true;
}

}  // namespace tessera
