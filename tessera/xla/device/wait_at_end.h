// A plugin's threads may not outlive its variables, of which some end before what a program has registered for its end.
#pragma once

#include <functional>

namespace tessera::xla {

/// When the calling thread ends, it calls `wait`; the first one that it was given. In the thread that ends the process, that is before
/// anything static ends. A child of a fork calls nothing.
void wait_at_end_of_thread(std::function<void()> wait);

}  // namespace tessera::xla
