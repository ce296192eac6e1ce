// A device whose work runs only when a test says so, for tests of what must hold while work is queued. Its memory is host memory, its
// streams are queues of closures, and its events are positions in them. It is not thread-safe.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>

namespace tessera::testing {

/// The first call registers the device.
c10::Device delayed_device();

c10::Stream new_stream();
c10::Stream current_stream();

/// Queues work on the current stream. It runs when run() or Event::synchronize() reaches it.
void enqueue(std::function<void()> work);
/// Runs the work that is queued on a stream, up to the first wait for an event of another stream that has not passed.
void run(const c10::Stream& stream);

/// The device memory that is allocated. Freed memory is reused by the next allocation of the same size.
size_t bytes_in_use();

}  // namespace tessera::testing
