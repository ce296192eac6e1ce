#include "tessera/shard/rank_range.h"

#include <algorithm>

namespace tessera {

ValueRange range_of_rank(const Mesh& mesh, const Span& span, int rank) {
  // A parameter in a buffer of its own is cut into equal chunks, and one span serves the ranks of all of them.
  const bool serves_all = mesh.shard().traits().packing != Packing::OneBuffer;
  const auto chunk = rank % mesh.shape().shard;
  const auto begin = serves_all ? std::min(chunk * span.shard_numel, span.numel) : span.shard_begin;
  return {.begin = begin, .numel = std::clamp<int64_t>(span.numel - begin, 0, span.shard_numel)};
}

}  // namespace tessera
