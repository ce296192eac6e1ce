// Where the parameters of a buffer lie, unsharded and sharded: arithmetic only.
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
  int64_t offset = 0;  // in the unsharded buffer
  int64_t numel = 0;
  int64_t shard_offset = 0;  // of the part in this rank's chunk, in that chunk
  int64_t shard_numel = 0;   // may be none
  int64_t shard_begin = 0;   // which value of the parameter the part starts with
};

struct BufferLayout {
  int64_t chunk = 0;
  std::vector<Span> spans;
};

/// Who computes a layout.
struct RankPlace {
  int rank = 0;
  int ranks = 1;
};

/// Parameters one after the other, cut anywhere. Every parameter starts at a multiple of `alignment` values, as it would in memory of its own:
/// kernels are faster, and some choose the order of their sums by it.
BufferLayout flat_layout(std::span<const int64_t> numels, int64_t alignment, RankPlace place);

/// One parameter, cut between rows of so many values: as many rows on every rank, fewer or none on the last ones.
BufferLayout row_layout(int64_t numel, int64_t row, RankPlace place);

/// Every parameter on one rank, neighbours together, so that the largest chunk is small.
BufferLayout whole_parameter_layout(std::span<const int64_t> numels, int64_t alignment, RankPlace place);

/// One parameter, cut as Communicator::own_chunk does, for a process that stands for all ranks: a shard is the whole chunk, with the padding that
/// ends the last one.
BufferLayout replica_layout(int64_t numel, int ranks);

}  // namespace tessera
