#include "tessera/shard/activation/held.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/activation/segment.h"
#include "tessera/shard/activation/stowed.h"

namespace tessera::activation {

Held Held::in_memory(const at::Tensor& tensor) {
  Held held;
  held.where_ = InMemory{.tensor = without_graph(tensor), .version = version_of(tensor)};
  return held;
}

Held Held::stowed(const at::Tensor& tensor, const Options& options) {
  if (!is_stowed(tensor, options)) return in_memory(tensor);
  Held held;
  held.where_ = Stowed::make(without_graph(tensor), options);
  return held;
}

Held::Held(std::shared_ptr<Segment> segment, size_t slot) : where_(InSlot{.segment = std::move(segment), .slot = slot}) {}

Held::Held(Held&& other) noexcept : where_(std::exchange(other.where_, std::monostate())) {}

Held& Held::operator=(Held&& other) noexcept {
  std::swap(where_, other.where_);
  return *this;
}

Held::~Held() {
  if (const auto* in = std::get_if<InSlot>(&where_)) in->segment->forget(in->slot);
}

at::Tensor Held::get() const {
  if (const auto* in = std::get_if<InSlot>(&where_)) return in->segment->value_of(in->slot);
  if (const auto* stowed = std::get_if<std::shared_ptr<Stowed>>(&where_)) return (*stowed)->get();
  const auto& in = std::get<InMemory>(where_);
  if (version_of(in.tensor) != in.version) refuse_change(in.tensor);
  return in.tensor;
}

bool Held::is_of(const c10::StorageImpl* storage) const {
  if (const auto* stowed = std::get_if<std::shared_ptr<Stowed>>(&where_)) return (*stowed)->is_of(storage);
  const auto* in = std::get_if<InMemory>(&where_);
  return in != nullptr && in->tensor.has_storage() && in->tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage;
}

void Held::separate() {
  if (const auto* stowed = std::get_if<std::shared_ptr<Stowed>>(&where_)) return (*stowed)->finish();
  auto& in = std::get<InMemory>(where_);
  const c10::impl::ExcludeDispatchKeyGuard unpaged(kPagingKey);
  in = {.tensor = in.tensor.clone(), .version = 0};
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

at::Tensor without_graph(const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard unpaged(kPagingKey);
  const c10::AutoGradMode no_grad(false);
  return tensor.detach();
}

}  // namespace tessera::activation
