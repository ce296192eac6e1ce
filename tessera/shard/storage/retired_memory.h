// Released memory of a device that queued work may still read: it is used again in the order of the queue, or freed when that work has
// ended.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

#include "tessera/base/event.h"

namespace tessera {

/// Keeps the memory until the event has passed. Also calls free_retired().
void retire(std::shared_ptr<at::DataPtr> memory, size_t bytes, Event last_use);

/// Returns retired memory of this size, or null. Work that the calling thread queues next on its current stream runs after the last use of
/// the memory; the host waits for nothing. So the memory of whole units does not grow however far the host runs ahead of its device.
std::shared_ptr<at::DataPtr> reuse_retired(size_t bytes, c10::Device device);

/// Frees the memory of all events that have passed. Returns how many pieces of memory are still kept.
size_t free_retired();

}  // namespace tessera
