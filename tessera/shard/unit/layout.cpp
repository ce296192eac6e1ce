#include "tessera/shard/unit/layout.h"

#include <algorithm>
#include <numeric>

#include "tessera/base/dynamic_code.h"

namespace tessera {
namespace {

int64_t aligned(int64_t count, int64_t alignment) {
  return (count + alignment - 1) / alignment * alignment;
}

int64_t divided(int64_t count, int64_t parts) {
  return (count + parts - 1) / parts;
}

/// Fills in the part of each parameter that falls into this rank's chunk.
void fill_shards(BufferLayout& layout, RankPlace place) {
  const int64_t begin = place.rank * layout.chunk;
  for (auto& span : layout.spans) {
    const int64_t first = std::clamp(span.offset, begin, begin + layout.chunk);
    const int64_t last = std::clamp(span.offset + span.numel, begin, begin + layout.chunk);
    span.shard_offset = first - begin;
    span.shard_numel = last - first;
    span.shard_begin = span.shard_numel > 0 ? first - span.offset : 0;
  }
}

/// Assigns parameters to ranks in order, so that no rank gets more than `most` values. Returns the number of parameters of each rank, or an
/// empty list if there are too few ranks.
std::vector<size_t> assigned(std::span<const int64_t> sizes, int64_t most, int ranks) {
  std::vector<size_t> counts(1);
  int64_t sum = 0;
  for (const auto size : sizes) {
    if (sum + size > most && counts.back() > 0) {
      counts.push_back(0);
      sum = 0;
    }
    counts.back()++;
    sum += size;
  }
  if (counts.size() > static_cast<size_t>(ranks)) return {};
  counts.resize(static_cast<size_t>(ranks));
  return counts;
}

}  // namespace

BufferLayout flat_layout(std::span<const int64_t> numels, int64_t alignment, RankPlace place, int64_t multiple) {
  BufferLayout layout;
  int64_t total = 0, of_chunks = std::lcm(alignment, multiple);
  for (const int64_t numel : numels) {
    auto of_start = alignment;
    if (numel >= DynamicCode::kLeast) {
      of_start = std::lcm(alignment, DynamicCode::kBlock);
      of_chunks = std::lcm(of_start, multiple);
    }
    total = aligned(total, of_start);
    layout.spans.push_back({.offset = total, .numel = numel});
    total += numel;
  }
  layout.chunk = aligned(divided(aligned(total, alignment), place.ranks), of_chunks);
  fill_shards(layout, place);
  return layout;
}

BufferLayout row_layout(int64_t numel, int64_t row, RankPlace place) {
  BufferLayout layout{.chunk = row == 0 ? 0 : divided(numel / row, place.ranks) * row, .spans = {{.numel = numel}}};
  fill_shards(layout, place);
  return layout;
}

BufferLayout whole_parameter_layout(std::span<const int64_t> numels, int64_t alignment, RankPlace place) {
  std::vector<int64_t> sizes;
  for (const int64_t numel : numels) sizes.push_back(aligned(numel, alignment));
  // Searches for the smallest chunk with which the ranks hold all parameters.
  int64_t low = sizes.empty() ? 0 : *std::ranges::max_element(sizes);
  int64_t high = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  while (low < high) {
    const auto middle = low + (high - low) / 2;
    if (assigned(sizes, middle, place.ranks).empty()) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  BufferLayout layout{.chunk = low, .spans = {}};
  size_t next = 0;
  int64_t rank = 0;
  for (const auto count : assigned(sizes, low, place.ranks)) {
    int64_t offset = rank++ * layout.chunk;
    for (size_t i = 0; i < count; i++, next++) {
      layout.spans.push_back({.offset = offset, .numel = numels[next]});
      offset += sizes[next];
    }
  }
  fill_shards(layout, place);
  return layout;
}

BufferLayout padded_chunk_layout(int64_t numel, int ranks) {
  return {.chunk = divided(numel, ranks), .spans = {{.numel = numel, .shard_numel = divided(numel, ranks)}}};
}

}  // namespace tessera
