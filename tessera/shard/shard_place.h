// Where a shard lies in the memory of its unit, for code that works on many shards at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/comm/mesh.h"
#include "tessera/shard/options.h"

namespace tessera {

class Unit;

struct ShardPlace {
  std::shared_ptr<Unit> unit;   // none for a tensor that is no shard
  const void* buffer = nullptr;  // shards of one buffer lie in one memory
  size_t index = 0;              // in the order in which they lie there

  explicit operator bool() const { return unit != nullptr; }
  /// Whether this shard begins where the other ends.
  bool follows(const ShardPlace& other) const { return unit != nullptr && buffer == other.buffer && index == other.index + 1; }
  const Mesh& mesh() const;
  Listing listing() const;
};

ShardPlace place_of(const at::Tensor& shard);

}  // namespace tessera
