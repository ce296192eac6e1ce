// The ranks of a world in rows, which shard, and columns, which replicate (HSDP). One row is plain sharding.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera {

struct MeshShape {
  int replicate = 1;
  int shard = 1;
};

/// A value, cheap to copy. Rank r of the world is in row r / shard and column r % shard, so a row consists of consecutive ranks and can be
/// a host.
class Mesh {
 public:
  /// All ranks in one row. Implicit, so that a Communicator can be passed as a mesh.
  Mesh(Communicator world);  // NOLINT(google-explicit-constructor)
  /// Collective, with the same shape on every rank. Throws UsageError unless replicate * shard is the size of the world.
  Mesh(Communicator world, MeshShape shape);

  const MeshShape& shape() const { return shape_; }
  const Communicator& world() const { return world_; }
  /// This rank's shard group: the ranks of its row, which together hold one copy of the parameters.
  const Communicator& shard() const { return shard_; }
  /// This rank's replicate group: the ranks of its column, which hold the same part of the parameters. A group of one in a mesh of one row.
  const Communicator& replicate() const { return replicate_; }

 private:
  MeshShape shape_;
  Communicator world_;
  Communicator shard_;
  Communicator replicate_;
};

}  // namespace tessera
