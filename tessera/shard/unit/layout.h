// Where the parameters of a flat buffer lie, whole and cut: arithmetic only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// One parameter in a buffer that is cut into equal chunks, one for each rank.
///
///   buffer   | p0 p0 p0 p0 | p0 p1 p1 p1 | p1 p2 .. .. |    .. padding
///   chunk           0             1             2
struct Span {
  int64_t offset = 0;  // in the whole buffer
  int64_t numel = 0;
  int64_t shard_offset = 0;  // of the part in this rank's chunk, in that chunk
  int64_t shard_numel = 0;   // may be none
  int64_t shard_begin = 0;   // which value of the parameter the part starts with
};

struct FlatLayout {
  int64_t chunk = 0;
  std::vector<Span> spans;

  /// Every parameter starts at a multiple of `alignment` values, as it would in memory of its own: kernels are faster, and some choose the
  /// order of their sums by it.
  FlatLayout(std::span<const int64_t> numels, int64_t alignment, int rank, int ranks);

  /// One parameter in a buffer of its own, cut like Communicator::own_chunk does. The same on every rank: a shard is the whole chunk, with
  /// the padding that ends the last one.
  FlatLayout(int64_t numel, int ranks);
};

}  // namespace tessera
