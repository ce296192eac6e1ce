// Refuses calls that have no meaning in the middle of a forward or backward pass.
#pragma once

#include <string_view>

namespace tessera {

/// Throws UsageError if this thread runs a forward pass, as far as that can be seen, or a backward pass. `what` is the name of the call.
void expect_idle(std::string_view what);

}  // namespace tessera
