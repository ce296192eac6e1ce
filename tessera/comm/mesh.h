// How the ranks of a world are laid out: in one row that shards, or in rows that shard and columns that replicate (HSDP).
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera {

struct MeshShape {
  int replicate = 1;
  int shard = 1;
};

/// A value, cheap to copy. Rank r of the world stands in row r / shard, at place r % shard: neighbours shard together, so that a row can
/// be a host.
class Mesh {
 public:
  /// All ranks in one row. Implicit, so that a Communicator serves wherever a mesh is asked for.
  Mesh(Communicator world);  // NOLINT(google-explicit-constructor)
  /// replicate * shard must be the size of the world. Collective: every rank calls it with the same shape.
  Mesh(Communicator world, MeshShape shape);

  const MeshShape& shape() const { return shape_; }
  const Communicator& world() const { return world_; }
  /// The ranks that together hold one copy of the parameters.
  const Communicator& shard() const { return shard_; }
  /// The ranks that hold the same part of it, one in each row. A group of one in a mesh of one row.
  const Communicator& replicate() const { return replicate_; }

 private:
  MeshShape shape_;
  Communicator world_;
  Communicator shard_;
  Communicator replicate_;
};

}  // namespace tessera
