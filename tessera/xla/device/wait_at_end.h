// A plugin's threads may not outlive its variables, of which some end before what a program has registered for its end.
#pragma once

namespace tessera::xla {

/// When the calling thread ends, it waits for the programs of the process's device. Of the thread that ends the process, that is before
/// anything static ends.
void wait_at_end_of_thread();

}  // namespace tessera::xla
