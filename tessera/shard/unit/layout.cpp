#include "tessera/shard/unit/layout.h"

#include <algorithm>

namespace tessera {

FlatLayout::FlatLayout(std::span<const int64_t> numels, int64_t alignment, int rank, int ranks) {
  const auto aligned = [&](int64_t count) { return (count + alignment - 1) / alignment * alignment; };
  int64_t total = 0;
  for (const int64_t numel : numels) {
    spans.push_back({.offset = total, .numel = numel});
    total = aligned(total + numel);
  }
  chunk = aligned((total + ranks - 1) / ranks);
  const int64_t begin = rank * chunk;
  for (auto& span : spans) {
    const int64_t first = std::clamp(span.offset, begin, begin + chunk);
    const int64_t last = std::clamp(span.offset + span.numel, begin, begin + chunk);
    span.shard_offset = first - begin;
    span.shard_numel = last - first;
    span.shard_begin = span.shard_numel > 0 ? first - span.offset : 0;
  }
}

FlatLayout::FlatLayout(int64_t numel, int ranks) : chunk((numel + ranks - 1) / ranks) {
  spans.push_back({.numel = numel, .shard_numel = chunk});
}

}  // namespace tessera
