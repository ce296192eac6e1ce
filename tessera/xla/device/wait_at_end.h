// Waits at the end of a thread: a plugin's threads must not outlive the plugin's static variables, some of which are destroyed before atexit
// handlers run.
#pragma once

#include <functional>

namespace tessera::xla {

/// Calls `wait` when the calling thread ends; later calls of the same thread have no effect. The thread that ends the process waits before
/// any static variable is destroyed. A forked child does not wait.
void wait_at_end_of_thread(std::function<void()> wait);

}  // namespace tessera::xla
