// What a rank receives in a step by arithmetic alone: from the sizes of parameters, the number of ranks, and how often units are gathered.
#pragma once

#include <string>

#include "train.h"

namespace tessera::parity {

/// Whose rules for dividing parameters and for gathering units apply.
enum class Side { Tessera, Fsdp2 };

Bytes bytes_by_formula(const Case& test, Side side);

}  // namespace tessera::parity
