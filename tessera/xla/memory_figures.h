// Memory and collectives of a compiled program, as its compiler reports them.
#pragma once

#include <cstdint>

namespace tessera::pjrt {

/// Bytes on each device.
struct MemoryFigures {
  int64_t arguments = 0, outputs = 0, aliased = 0, temporary = 0, code = 0, peak = 0;
};

/// Collectives of one kind in a program, and the bytes of their results on each device.
struct Collectives {
  int count = 0;
  int64_t bytes = 0;
};

}  // namespace tessera::pjrt
