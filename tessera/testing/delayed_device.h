// A device whose work runs when a test lets it, for what must hold while work is queued: its memory is host memory, its streams are queues
// of closures, and its events are marks in them. For tests of one thread.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>

namespace tessera::testing {

/// Registers the device when it is first asked for.
c10::Device delayed_device();

c10::Stream new_stream();
c10::Stream current_stream();

/// Queues work on the current stream, where it stays until run() or Event::synchronize() comes to it.
void enqueue(std::function<void()> work);
/// Runs what is queued on a stream, up to where it waits for an event of another one.
void run(const c10::Stream& stream);

/// Of device memory. What is freed goes at once to whoever asks for as many bytes next.
size_t bytes_in_use();

}  // namespace tessera::testing
