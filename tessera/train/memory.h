// The memory of this process, as values for Progress and reports.
#pragma once

#include "tessera/train/value.h"

namespace tessera::train {

/// The resident memory of this process: {"memory", 3.2e9, Unit::Bytes}. Memory that ranks of a host share counts fully in each rank.
Value memory();

/// The most memory that the process has had so far: {"peak_memory", 4.1e9, Unit::Bytes}
Value peak_memory();

}  // namespace tessera::train
