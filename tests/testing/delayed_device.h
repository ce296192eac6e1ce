// A device whose work runs only when a test says so, or when the host reads a value, for tests of what must hold while work is queued. Its
// memory is host memory, its streams are queues of closures, and its events are positions in them. Each thread has a current stream of its
// own. Operators are queued, too; the CPU's kernels do their work.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <functional>

namespace c10d {
class Backend;
}

namespace tessera::testing {

/// The first call registers the device.
c10::Device delayed_device();

c10::Stream new_stream();
c10::Stream current_stream();

/// Queues work on the current stream. It runs when run() or Event::synchronize() reaches it.
void enqueue(std::function<void()> work);
/// Runs the work that is queued on a stream, up to the first wait for an event of another stream that has not passed.
void run(const c10::Stream& stream);

/// Runs all queued work. Runs the work of the current stream as early as possible (First) or as late as possible (Last): in one of these
/// orders, work that lacks a wait for another stream reads memory that is not written yet.
enum class Current { First, Last };
void run_all(Current current = Current::First);

/// Sets whether the device lags. If not, queued work runs at once.
void set_lags(bool lags);

/// How often the host has waited for the device, not only asked whether work has ended: host_waits() counts all threads, own_waits() only
/// the calling one.
size_t host_waits();
size_t own_waits();

/// How many events the device was asked to record.
size_t events_recorded();

/// Sets whether freed memory is kept for streams that recordDataPtrOnStream has named as users, as an allocator should do.
void set_keeps_memory(bool keeps);

/// Whether the host memory is pinned, so that copies from and to it may be queued.
bool is_pinned(const void* address);
/// Keeps this pinned memory from being freed until the current stream has run the work that is queued on it now.
void note_use_of_pinned(const void* address);
/// Sets how much memory may be allocated at the same time; an allocation that does not fit throws the error of CUDA's allocator.
void set_room(size_t bytes);

/// The device memory that is allocated. Freed memory is reused by the next allocation of the same size.
size_t bytes_in_use();

/// A c10d backend for the device, with a stream of its own as NCCL has. Its peers are simulated: each does what this rank does.
c10::intrusive_ptr<c10d::Backend> delayed_backend(int rank, int size);

}  // namespace tessera::testing
