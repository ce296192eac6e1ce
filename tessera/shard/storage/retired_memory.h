// Keeps released memory of a device until the work that may still read it has finished.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

#include "tessera/base/event.h"

namespace tessera {

/// Keeps the memory until the event has passed. Also calls free_retired().
void retire(std::shared_ptr<at::DataPtr> memory, Event last_use);

/// Frees the memory of all events that have passed. Returns how many pieces of memory are still kept.
size_t free_retired();

}  // namespace tessera
