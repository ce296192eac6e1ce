// Pinned host memory, and the streams on which a device copies from and to it while it computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "tessera/base/event.h"

namespace tessera {

/// Whether this device copies from and to pinned memory. XLA devices copy in ways of their own.
bool has_pinned_memory(c10::Device device);
/// Allocates pinned host memory for copies from and to this device.
at::DataPtr allocate_pinned(size_t bytes, c10::Device device);
/// Returns a contiguous, uninitialized tensor in pinned memory for this device.
at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

/// The stream on which copies in one direction run.
enum class Copying { ToDevice, ToHost };
c10::Stream copy_stream(c10::Device device, Copying direction);

/// Starts a copy of device values to pinned memory, after the work that the calling thread has queued on its current stream. `pinned` may
/// be read after the event; until then both tensors must live.
Event copy_to_pinned(const at::Tensor& values, const at::Tensor& pinned);

}  // namespace tessera
