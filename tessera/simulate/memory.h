// The memory of a dry run: reserved, counted, and touched only where values are written.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <numeric>

#include "tessera/comm/simulation.h"

namespace tessera::simulate {

/// Bytes of each kind of memory.
struct MemoryUse : std::array<uint64_t, kMemoryKinds> {
  uint64_t all() const { return std::accumulate(begin(), end(), uint64_t{0}); }
};

/// From now on, tensors in host memory get such memory, which is zero at first, and those of this thread are counted. `at_peak` is called
/// whenever more is in use than before. Memory that is allocated outside of a
/// MemoryScope counts as MemoryKind::Activations.
void count_memory(std::function<void(const MemoryUse&)> at_peak);
/// Counts memory that does not belong to a tensor and is never freed.
void add_memory(MemoryKind kind, uint64_t bytes);
/// Forgets the peak so far.
void reset_peak();
MemoryUse memory_in_use();

}  // namespace tessera::simulate
