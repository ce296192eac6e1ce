// Copies tensors to buffers of a device and back.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/xla/pjrt/client_impl.h"

namespace tessera::pjrt {

Buffer Buffer::absent(ArrayType type) { return Buffer(std::make_shared<Impl>(std::move(type))); }

const ArrayType& Buffer::type() const { return impl_->type; }

int Buffer::device() const { return impl_->device; }

bool Buffer::is_donated() const {
  if (!impl_->handle.get()) return false;
  Padded<PJRT_Buffer_IsDeleted_Args> arguments;
  arguments.buffer = impl_->handle.get();
  impl_->handle.call<PJRT_Buffer_IsDeleted_Args>("tell of a buffer", &PJRT_Api::PJRT_Buffer_IsDeleted, arguments);
  return arguments.is_deleted;
}

namespace {

PJRT_Event* ready_event(const BufferHandle& buffer) {
  Padded<PJRT_Buffer_ReadyEvent_Args> arguments;
  arguments.buffer = buffer.get();
  buffer.call<PJRT_Buffer_ReadyEvent_Args>("wait for a result", &PJRT_Api::PJRT_Buffer_ReadyEvent, arguments);
  return arguments.event;
}

}  // namespace

bool Buffer::is_ready() const {
  if (!impl_->handle.get()) return true;
  const EventHandle event(impl_->handle.api(), ready_event(impl_->handle));
  if (!event.get()) return true;
  Padded<PJRT_Event_IsReady_Args> arguments;
  arguments.event = event.get();
  event.call<PJRT_Event_IsReady_Args>("look whether a result is there", &PJRT_Api::PJRT_Event_IsReady, arguments);
  return arguments.is_ready;
}

void Buffer::wait() const {
  if (impl_->handle.get()) pjrt::wait(impl_->handle.api(), ready_event(impl_->handle), "compute a result");
}

at::Tensor Buffer::download() const {
  if (!impl_->handle.get()) return at::zeros(impl_->type.sizes, impl_->type.element);
  auto tensor = at::empty(impl_->type.sizes, impl_->type.element);
  if (tensor.numel() == 0) return tensor;
  Padded<PJRT_Buffer_ToHostBuffer_Args> arguments;
  arguments.src = impl_->handle.get();
  arguments.dst = tensor.mutable_data_ptr();
  arguments.dst_size = tensor.nbytes();
  impl_->handle.call<PJRT_Buffer_ToHostBuffer_Args>("download a buffer", &PJRT_Api::PJRT_Buffer_ToHostBuffer, arguments);
  pjrt::wait(impl_->handle.api(), arguments.event, "download a buffer");
  return tensor;
}

}  // namespace tessera::pjrt
