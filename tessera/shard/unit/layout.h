// Computes where the parameters of a buffer lie, both in the unsharded buffer and in the chunks of the ranks. Arithmetic only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// The place of one parameter in a buffer that is split into equal chunks, one for each rank.
///
///   buffer   | p0 p0 p0 p0 | p0 p1 p1 p1 | p1 p2 .. .. |    .. padding
///   chunk           0             1             2
struct Span {
  int64_t offset = 0;  // where the parameter begins in the unsharded buffer
  int64_t numel = 0;
  int64_t shard_offset = 0;  // where this rank's part begins, counted from the beginning of its chunk
  int64_t shard_numel = 0;   // size of this rank's part; may be 0
  int64_t shard_begin = 0;   // index of the part's first value within the parameter
};

struct BufferLayout {
  int64_t chunk = 0;
  std::vector<Span> spans;
};

/// The rank for which a layout is computed.
struct RankPlace {
  int rank = 0;
  int ranks = 1;
};

/// Puts parameters one after the other, and may split them at any value. Each parameter starts at a multiple of `alignment` values, as it
/// would in memory of its own: kernels are faster with aligned memory, and some choose the order of their sums by the alignment. The size
/// of a chunk is a multiple of `alignment` and of `multiple` values. Parameters whose optimizer state may be in blocks of a DynamicCode are
/// split only between blocks.
BufferLayout flat_layout(std::span<const int64_t> numels, int64_t alignment, RankPlace place, int64_t multiple = 1);

/// Splits one parameter between rows of `row` values. All ranks get the same number of rows, except that the last ranks may get fewer or
/// none.
BufferLayout row_layout(int64_t numel, int64_t row, RankPlace place);

/// Gives each parameter to one rank. Keeps the order of the parameters, and makes the largest chunk as small as that order allows.
BufferLayout whole_parameter_layout(std::span<const int64_t> numels, int64_t alignment, RankPlace place);

/// Splits one parameter as Communicator::own_chunk does, for a process that represents all ranks. A shard is the complete chunk, including
/// the padding at the end of the last chunk.
BufferLayout padded_chunk_layout(int64_t numel, int ranks);

}  // namespace tessera
