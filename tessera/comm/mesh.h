// The ranks of a world along named axes, such as rows that shard and columns that replicate (HSDP). One axis is plain sharding.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

struct MeshShape {
  int replicate = 1;
  int shard = 1;
};

struct MeshAxis {
  std::string name;
  int size = 1;  // at most one axis may have -1: as many ranks as the other axes leave
};

/// A value, cheap to copy. Equal meshes of one world share their groups. The last axis varies fastest, so ranks along it are consecutive,
/// such as those of a host. A mesh of one axis shards a model over it; a mesh of two axes replicates over the first and shards over the
/// second. From a mesh with more axes, `sub` takes the axes that a model needs.
class Mesh {
 public:
  /// One axis, "shard". Implicit, so that a Communicator can be passed as a mesh.
  Mesh(Communicator world);  // NOLINT(google-explicit-constructor)
  /// The axes "replicate" and "shard": rank r of the world is in row r / shard and column r % shard.
  Mesh(Communicator world, MeshShape shape);
  /// Collective, with the same axes on every rank. Throws UsageError unless their sizes multiply to the size of the world.
  Mesh(Communicator world, std::vector<MeshAxis> axes);

  /// Collective: a mesh of the group to which this rank belongs. The groups are a partition of the world, and each shards a model of its
  /// own. Ranks in a group are in ascending order.
  static Mesh of_groups(const Communicator& world, const std::vector<std::vector<int>>& groups);
  /// Collective: shards among the ranks of a host, and replicates across hosts. Throws UsageError if hosts differ in their number of ranks.
  static Mesh by_host(const Communicator& world);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  const Communicator& world() const { return world_; }
  /// This rank's group along an axis: the ranks that differ from it only there.
  const Communicator& group(std::string_view axis) const { return groups_[index_of(axis)]; }
  /// The mesh of some axes, named in the order of this mesh. Its world has the ranks that differ from this rank only in those axes.
  /// Collective, unless `axes` has one axis or all.
  Mesh sub(const std::vector<std::string>& axes) const;
  Mesh operator[](const std::string& axis) const { return sub({axis}); }

  // The functions below say how a model is sharded over a mesh of one or two axes. They throw UsageError if the mesh has more.
  MeshShape shape() const { return {.replicate = replicate().size(), .shard = shard().size()}; }
  /// This rank's shard group: the ranks of its row, which together hold one copy of the parameters.
  const Communicator& shard() const {
    if (axes_.size() > 2) refuse();
    return groups_.back();
  }
  /// This rank's replicate group: the ranks of its column, which hold the same part of the parameters. A group of one in a mesh of one
  /// axis.
  const Communicator& replicate() const {
    if (axes_.size() > 2) refuse();
    return axes_.size() == 1 ? alone_ : groups_.front();
  }

 private:
  /// `places`: for each rank, its number if ranks are counted along the last axis first.
  Mesh(Communicator world, std::vector<MeshAxis> axes, std::vector<int> places, std::vector<Communicator> groups);

  size_t index_of(std::string_view axis) const;
  [[noreturn]] void refuse() const;

  Communicator world_;
  std::vector<MeshAxis> axes_;
  std::vector<int> places_;
  std::vector<Communicator> groups_;  // this rank's group along each axis
  Communicator alone_;
};

}  // namespace tessera
