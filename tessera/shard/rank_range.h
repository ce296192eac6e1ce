// Which values of a parameter the ranks hold that a process stands for.
#pragma once

#include "tessera/comm/mesh.h"
#include "tessera/shard/unit/layout.h"

namespace tessera {

/// Values of a parameter in the order in which they lie in memory.
struct ValueRange {
  int64_t begin = 0, numel = 0;
};

/// Of one of the local ranks of the mesh's world, without the padding that may end its shard.
ValueRange range_of_rank(const Mesh& mesh, const Span& span, int rank);

}  // namespace tessera
