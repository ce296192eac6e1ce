// Copies buffers of a device to tensors, and asks the plugin about their state.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/xla/pjrt/client_impl.h"

namespace tessera::pjrt {

Buffer Buffer::absent(ArrayType type) {
  return Buffer(std::make_shared<Impl>(std::move(type)));
}

const ArrayType& Buffer::type() const {
  return impl_->type;
}

int Buffer::device() const {
  return impl_->device;
}

bool Buffer::is_donated() const {
  if (!impl_->handle.get()) return false;
  return impl_->handle.call("say whether a buffer was donated", &PJRT_Api::PJRT_Buffer_IsDeleted, {.buffer = impl_->handle.get()}).is_deleted;
}

namespace {

PJRT_Event* ready_event(const BufferHandle& buffer) {
  return buffer.call("wait for a result", &PJRT_Api::PJRT_Buffer_ReadyEvent, {.buffer = buffer.get()}).event;
}

}  // namespace

bool Buffer::is_ready() const {
  if (!impl_->handle.get()) return true;
  const EventHandle event(impl_->handle.api(), ready_event(impl_->handle));
  return !event.get() || event.call("say whether a result is ready", &PJRT_Api::PJRT_Event_IsReady, {.event = event.get()}).is_ready;
}

void Buffer::wait() const {
  if (impl_->handle.get()) pjrt::wait(impl_->handle.api(), ready_event(impl_->handle), "compute a result");
}

at::Tensor Buffer::download() const {
  if (!impl_->handle.get()) return at::zeros(impl_->type.sizes, impl_->type.element);
  auto tensor = at::empty(impl_->type.sizes, impl_->type.element);
  if (tensor.numel() == 0) return tensor;
  constexpr auto doing = "download a buffer";
  const auto copy = impl_->handle.call(doing, &PJRT_Api::PJRT_Buffer_ToHostBuffer,
                                       {.src = impl_->handle.get(), .dst = tensor.mutable_data_ptr(), .dst_size = tensor.nbytes()});
  pjrt::wait(impl_->handle.api(), copy.event, doing);
  return tensor;
}

}  // namespace tessera::pjrt
