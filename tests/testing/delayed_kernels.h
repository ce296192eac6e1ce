// The operators of the delayed device.
#pragma once

namespace tessera::testing {

void register_delayed_kernels();

}  // namespace tessera::testing
