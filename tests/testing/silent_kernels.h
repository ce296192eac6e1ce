// The operators of the silent device.
#pragma once

namespace tessera::testing {

void register_silent_kernels();
void count_host_read();

}  // namespace tessera::testing
