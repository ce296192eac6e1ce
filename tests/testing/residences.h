// Where the memory of units may be in a test.
#pragma once

#include <vector>

#include "tessera/shard/options.h"
#include "tests/testing/default_device.h"

namespace tessera::testing {

/// All residences, but on a device only those that need no shared memory.
inline std::vector<Residence> residences() {
  if (on_cpu()) return {Residence::Gathered, Residence::NodeShared};
  return {Residence::Gathered};
}

}  // namespace tessera::testing
