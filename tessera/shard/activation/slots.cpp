#include "tessera/shard/activation/slots.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/activation/tensor_version.h"

namespace tessera::activation {

size_t Slots::add(const at::Tensor& tensor) {
  slots_.push_back({.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type()});
  return slots_.size() - 1;
}

void Slots::fill(size_t index, const at::Tensor& tensor) {
  auto& slot = slots_[index];
  if (tensor.sizes() != slot.sizes || tensor.scalar_type() != slot.dtype) {
    throw UsageError(fmt::format(
        "a checkpointed segment did something else when it ran again in backward: it saved a {} tensor of shape [{}] where it had "
        "saved a {} tensor of shape [{}] in forward; it must depend on nothing but its inputs and parameters",
        c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "), c10::toString(slot.dtype), fmt::join(slot.sizes, ", ")));
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
    if (missing_ > 0) {
      throw UsageError(fmt::format(
          "a checkpointed segment did something else when it ran again in backward: {} of the tensors that it had saved in forward "
          "did not come again; it must depend on nothing but its inputs and parameters",
          missing_));
    }
    // Of a graph that is kept for another backward pass, no values are.
    if (torch::autograd::get_current_graph_task_id() != -1) {
      torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
        const auto self = weak.lock();
        if (!self) return;
        const std::lock_guard lock(self->mutex_);
        for (auto& slot : self->slots_) slot.value.reset();
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

}  // namespace tessera::activation
