// Waits at the end of threads: a plugin's threads may not outlive its static variables, some of which end before atexit handlers run.
#pragma once

#include <functional>

namespace tessera::xla {

/// Calls `wait` when the calling thread ends; the first `wait` of a thread counts. In the thread that ends the process, that is before
/// anything static ends. A forked child calls nothing.
void wait_at_end_of_thread(std::function<void()> wait);

}  // namespace tessera::xla
