#include "tessera/shard/activation/saved_tensor.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/tied.h"
#include "tessera/shard/activation/tensor_version.h"
#include "tessera/shard/storage/paged_tensor.h"

namespace tessera::activation {

/// Values of a tensor in host memory or on disk.
struct Offloaded {
  c10::Device device;
  at::Tensor values;
  const c10::StorageImpl* storage;        // where the values were; only compared by address
  std::weak_ptr<const Offloaded> before;  // the tensor that was offloaded just before; backward needs it next
};

namespace {

at::Tensor empty_on_disk(const at::Tensor& like, const DiskMemoryOptions& options) {
  auto memory = allocate_on_disk(like.nbytes(), {.folder = options.folder}, "activations (activation::Options::disk)");
  const c10::Storage storage(c10::Storage::use_byte_size_t(), like.nbytes(), std::move(memory), nullptr, false);
  return at::empty({0}, like.options().device(at::kCPU)).set_(storage, 0, like.sizes(), like.strides());
}

at::Tensor empty_on_host(const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCPU).pinned_memory(like.is_cuda()));
}

bool should_offload(const at::Tensor& tensor, const Options& options) {
  if (options.offload == OffloadTo::Nowhere || (options.offload == OffloadTo::Host && tensor.is_cpu())) return false;
  if (can_tie(tensor.device().type())) {
    throw UsageError(
        "activations on {} can't be offloaded, because they have no memory before the traced program has run; leave "
        "activation::Options::offload unset there; checkpointed segments keep only their inputs",
        tensor.device().str());
  }
  if (is_paged(tensor) || (tensor.is_leaf() && tensor.requires_grad()) || !tensor.has_storage()) return false;
  if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return false;
  if (options.offload != OffloadTo::Disk || options.disk.fraction == 1) return true;
  thread_local double owed = 0;  // bytes that `fraction` assigns to the disk, but that are less than a whole tensor so far
  owed += options.disk.fraction * static_cast<double>(tensor.nbytes());
  if (owed < static_cast<double>(tensor.nbytes())) return false;
  owed -= static_cast<double>(tensor.nbytes());
  return true;
}

}  // namespace

size_t Slots::add(const at::Tensor& tensor) {
  slots_.push_back({.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type()});
  return slots_.size() - 1;
}

void Slots::fill(size_t index, const at::Tensor& tensor) {
  auto& slot = slots_[index];
  if (tensor.sizes() != slot.sizes || tensor.scalar_type() != slot.dtype) {
    refuse_difference(fmt::format("it saved a {} tensor of shape [{}] where it had saved a {} tensor of shape [{}] in forward",
                                  c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "), c10::toString(slot.dtype),
                                  fmt::join(slot.sizes, ", ")));
  }
  if (slot.is_missing()) {
    slot.value = detached(tensor);
    slot.version = version_of(slot.value);
    missing_--;
  }
  if (missing_ == 0) throw StopRecompute{this};
}

at::Tensor Slots::value_of(size_t index) {
  const std::lock_guard lock(mutex_);
  if (!slots_[index].value.defined()) {
    missing_ = std::ranges::count_if(slots_, &Slot::is_missing);
    recompute();
    if (missing_ > 0) refuse_difference(fmt::format("{} of the tensors that it had saved in forward were not saved again", missing_));
    // A graph may be kept for another backward pass (retain_graph), but not its recomputed values.
    if (torch::autograd::get_current_graph_task_id() != -1) {
      torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
        const auto self = weak.lock();
        if (!self) return;
        const std::lock_guard lock(self->mutex_);
        for (auto& slot : self->slots_) slot.value.reset();
        self->end_pass();
      });
    }
  }
  const auto& slot = slots_[index];
  expect_version(slot.value, slot.version);
  return slot.value;
}

void Slots::release(size_t index) {
  const std::lock_guard lock(mutex_);
  slots_[index].needed = false;
  slots_[index].value.reset();
}

SavedTensor SavedTensor::in_memory(const at::Tensor& tensor) {
  SavedTensor saved;
  saved.where_ = InMemory{.tensor = detached(tensor), .version = version_of(tensor)};
  return saved;
}

SavedTensor SavedTensor::offloaded(const at::Tensor& tensor, const Options& options) {
  if (!should_offload(tensor, options)) return in_memory(tensor);
  const BelowPaging below;
  const bool to_disk = options.offload == OffloadTo::Disk;
  const auto values = to_disk ? empty_on_disk(tensor, options.disk) : empty_on_host(tensor);
  values.copy_(tensor, /*non_blocking=*/!to_disk);
  evict_pages(values.const_data_ptr(), values.nbytes());
  thread_local std::weak_ptr<const Offloaded> last;
  const auto made = std::make_shared<const Offloaded>(tensor.device(), values, storage_of(tensor), last);
  last = made;
  SavedTensor saved;
  saved.where_ = made;
  return saved;
}

SavedTensor::SavedTensor(const std::shared_ptr<Slots>& slots, size_t slot)
    : where_(InSlot{.slots = {slots.get(), [slots, slot](Slots* owner) { owner->release(slot); }}, .slot = slot}) {}

at::Tensor SavedTensor::get() const {
  if (const auto* in = std::get_if<InSlot>(&where_)) return in->slots->value_of(in->slot);
  if (const auto* offloaded = std::get_if<std::shared_ptr<const Offloaded>>(&where_)) {
    const auto& [device, values, storage, earlier] = **offloaded;
    if (const auto before = earlier.lock()) read_pages_ahead(before->values.const_data_ptr(), before->values.nbytes());
    const BelowPaging below;
    return values.to(device, /*non_blocking=*/true);
  }
  const auto& [tensor, version] = std::get<InMemory>(where_);
  expect_version(tensor, version);
  return tensor;
}

bool SavedTensor::is_of(const c10::StorageImpl* storage) const {
  if (const auto* offloaded = std::get_if<std::shared_ptr<const Offloaded>>(&where_)) return (*offloaded)->storage == storage;
  const auto* in = std::get_if<InMemory>(&where_);
  return in != nullptr && storage_of(in->tensor) == storage;
}

void SavedTensor::copy_values() {
  const BelowPaging below;
  if (auto* in = std::get_if<InMemory>(&where_)) *in = {.tensor = in->tensor.clone(), .version = 0};
}

}  // namespace tessera::activation
