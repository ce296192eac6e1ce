#include "tessera/shard/activation/saved_tensor.h"

#include <ATen/ATen.h>

#include <utility>

#include "tessera/shard/activation/offloaded.h"
#include "tessera/shard/activation/slots.h"
#include "tessera/shard/activation/tensor_version.h"

namespace tessera::activation {

SavedTensor SavedTensor::in_memory(const at::Tensor& tensor) {
  SavedTensor saved;
  saved.where_ = InMemory{.tensor = detached(tensor), .version = version_of(tensor)};
  return saved;
}

SavedTensor SavedTensor::offloaded(const at::Tensor& tensor, const Options& options) {
  if (!should_offload(tensor, options)) return in_memory(tensor);
  SavedTensor saved;
  saved.where_ = Offloaded::make(detached(tensor), options);
  return saved;
}

SavedTensor::SavedTensor(std::shared_ptr<Slots> slots, size_t slot) : where_(InSlot{.slots = std::move(slots), .slot = slot}) {}

SavedTensor::SavedTensor(SavedTensor&& other) noexcept : where_(std::exchange(other.where_, std::monostate())) {}

SavedTensor& SavedTensor::operator=(SavedTensor&& other) noexcept {
  std::swap(where_, other.where_);
  return *this;
}

SavedTensor::~SavedTensor() {
  if (const auto* in = std::get_if<InSlot>(&where_)) in->slots->release(in->slot);
}

at::Tensor SavedTensor::get() const {
  if (const auto* in = std::get_if<InSlot>(&where_)) return in->slots->value_of(in->slot);
  if (const auto* offloaded = std::get_if<std::shared_ptr<const Offloaded>>(&where_)) return (*offloaded)->get();
  const auto& [tensor, version] = std::get<InMemory>(where_);
  expect_version(tensor, version);
  return tensor;
}

bool SavedTensor::is_of(const c10::StorageImpl* storage) const {
  if (const auto* offloaded = std::get_if<std::shared_ptr<const Offloaded>>(&where_)) return (*offloaded)->is_of(storage);
  const auto* in = std::get_if<InMemory>(&where_);
  return in != nullptr && storage_of(in->tensor) == storage;
}

void SavedTensor::copy_values() {
  const Unrecorded unrecorded;
  if (auto* in = std::get_if<InMemory>(&where_)) *in = {.tensor = in->tensor.clone(), .version = 0};
}

}  // namespace tessera::activation
