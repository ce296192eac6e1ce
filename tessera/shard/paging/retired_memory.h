// Memory that nobody may use any more, but that work queued on a device may still read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

#include "tessera/base/event.h"

namespace tessera {

/// Keeps the memory until the event has passed. What has passed before is freed by the way.
void retire(std::shared_ptr<at::DataPtr> memory, Event last_use);

/// Frees what may be freed, and says how many pieces have to wait.
size_t free_retired();

}  // namespace tessera
