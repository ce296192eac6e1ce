#include "tessera/xla/device/ties.h"

#include <algorithm>

#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

/// Whether a barrier may take the tensor's elements alone. Otherwise the barrier takes the whole storage, so that its result can have the
/// tensor's strides.
bool is_plain(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) return true;
  const auto& whole = cell_of(tensor).value;
  return !whole || whole.element() != tensor.scalar_type();
}

at::Tensor as_before(const Value& value, const at::Tensor& before) {
  const auto tensor = new_tensor(value);
  return is_plain(before) ? tensor : tensor.as_strided(before.sizes(), before.strides(), before.storage_offset());
}

}  // namespace

void put_behind_barrier(std::vector<Value>& values, std::span<at::Tensor> tensors) {
  if (std::ranges::none_of(tensors, is_xla)) return;
  auto together = values;
  for (const auto& tensor : tensors) {
    if (is_xla(tensor)) together.push_back(is_plain(tensor) ? read(tensor) : flat(cell_of(tensor).value));
  }
  const auto after = barrier(together);
  std::copy_n(after.begin(), values.size(), values.begin());
  auto next = after.begin() + static_cast<std::ptrdiff_t>(values.size());
  for (auto& tensor : tensors) {
    if (is_xla(tensor)) tensor = as_before(*next++, tensor);
  }
}

std::vector<at::Tensor> tied_on_device(std::vector<at::Tensor> values, std::span<const at::Tensor> after) {
  const auto lock = lock_device();
  std::vector<Value> others;
  for (const auto& tensor : after) {
    if (is_xla(tensor)) others.push_back(read(tensor));
  }
  put_behind_barrier(others, values);
  return values;
}

}  // namespace tessera::xla
