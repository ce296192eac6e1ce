#include "tessera/xla/device/ties.h"

#include <algorithm>

#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {

void put_behind_barrier(std::vector<Value>& values, std::span<at::Tensor> tensors) {
  if (std::ranges::none_of(tensors, is_xla)) return;
  auto together = values;
  for (const auto& tensor : tensors) {
    if (is_xla(tensor)) together.push_back(read(tensor));
  }
  const auto tied = hlo::barrier(together);
  std::copy_n(tied.begin(), values.size(), values.begin());
  auto next = tied.begin() + static_cast<std::ptrdiff_t>(values.size());
  for (auto& tensor : tensors) {
    if (is_xla(tensor)) tensor = new_tensor(*next++);
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
