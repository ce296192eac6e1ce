// Where the memory of units may be in a test.
#pragma once

#include <vector>

#include "tessera/shard/options.h"
#include "tests/testing/default_device.h"

namespace tessera::testing {

/// All, but on a device those alone that need no memory in common.
inline std::vector<Residence> residences() {
  if (on_cpu()) return {Residence::Gathered, Residence::NodeShared};
  return {Residence::Gathered};
}

}  // namespace tessera::testing
