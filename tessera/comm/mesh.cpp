#include "tessera/comm/mesh.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/comm/self/self.h"

namespace tessera {
namespace {

std::vector<int> colors(int size, auto color_of) {
  std::vector<int> result;
  for (int r = 0; r < size; r++) result.push_back(color_of(r));
  return result;
}

MeshShape checked(const Communicator& world, MeshShape shape) {
  if (shape.replicate < 1 || shape.shard < 1 || shape.replicate * shape.shard != world.size()) {
    throw UsageError(
        fmt::format("a mesh of {} x {} (replicate x shard) does not fit a world of {} ranks", shape.replicate, shape.shard, world.size()));
  }
  return shape;
}

}  // namespace

Mesh::Mesh(Communicator world)
    : shape_{.replicate = 1, .shard = world.size()}, world_(world), shard_(world), replicate_(self_world().with_limit(world.limit())) {}

Mesh::Mesh(Communicator world, MeshShape shape)
    : shape_(checked(world, shape)),
      world_(world),
      shard_(world.split(colors(world.size(), [&](int r) { return r / shape.shard; }))),
      replicate_(world.split(colors(world.size(), [&](int r) { return r % shape.shard; }))) {}

}  // namespace tessera
