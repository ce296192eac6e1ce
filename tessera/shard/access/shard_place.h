// Where a shard lies in the memory of its unit, for code that works on many shards at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/comm/mesh.h"
#include "tessera/shard/options.h"

namespace tessera {

class Unit;

struct ShardPlace {
  std::shared_ptr<Unit> unit;    // null if the tensor is not a shard
  const void* buffer = nullptr;  // identifies the buffer that holds the shard; only for comparison
  size_t index = 0;              // position among the shards of that buffer, in memory order

  explicit operator bool() const { return unit != nullptr; }
  /// Whether this shard comes directly after the other shard in the same buffer.
  bool follows(const ShardPlace& other) const { return unit != nullptr && buffer == other.buffer && index == other.index + 1; }
  const Mesh& mesh() const;
  /// Whether the mesh of the shard's unit contains all ranks of the model.
  bool is_on_all_ranks() const;
  Listing listing() const;
  /// Whether each rank's part of the parameter begins at a multiple of this many values.
  bool is_cut_at_multiples_of(int64_t values) const;
  /// Whether the shard is in host memory while a device computes with the unit.
  bool is_offloaded() const;
};

ShardPlace place_of(const at::Tensor& shard);

/// Whether the tensor is the unsharded form of a parameter, which modules hold in their members and no optimizer can train.
bool is_unsharded_form(const at::Tensor& parameter);

}  // namespace tessera
