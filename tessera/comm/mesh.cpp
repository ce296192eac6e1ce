#include "tessera/comm/mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/comm/self/self.h"

namespace tessera {
namespace {

std::string text_of(const std::vector<MeshAxis>& axes) {
  std::vector<std::string> parts;
  for (const auto& axis : axes) parts.push_back(fmt::format("{} = {}", axis.name, axis.size));
  return fmt::format("{}", fmt::join(parts, " x "));
}

/// Checks the axes, and returns them with the size that was left open (-1) filled in.
std::vector<MeshAxis> checked(const Communicator& world, std::vector<MeshAxis> axes) {
  const auto refuse = [&](std::string_view why) {
    throw UsageError("a mesh of the axes {} {}", axes.empty() ? "(none)" : text_of(axes), why);
  };
  if (axes.empty()) refuse("has no place for a rank; give at least one, such as {\"shard\", -1}");
  int64_t known = 1;
  MeshAxis* open = nullptr;
  for (auto& axis : axes) {
    if (axis.name.empty()) refuse("has one without a name");
    if (std::ranges::count(axes, axis.name, &MeshAxis::name) > 1) refuse(fmt::format("has '{}' twice", axis.name));
    if (axis.size == -1) {
      if (open != nullptr) refuse("leaves two sizes open; only one of them may be -1");
      open = &axis;
    } else if (axis.size < 1) {
      refuse(fmt::format("has no ranks along '{}'; sizes are positive, or -1 for the rest", axis.name));
    } else {
      known *= axis.size;
      if (known > world.size()) break;
    }
  }
  if (world.size() % known != 0 || (open == nullptr && known != world.size())) {
    refuse(fmt::format("does not fit a world of {} ranks; the sizes have to multiply to that", world.size()));
  }
  if (open != nullptr) open->size = static_cast<int>(world.size() / known);
  if (axes.size() == 2 && (axes[0].name == "shard" || axes[1].name == "replicate")) {
    refuse("replicates over the first and shards over the second, contrary to their names; exchange them");
  }
  return axes;
}

/// The number of places from one rank to the next along an axis.
int stride_of(const std::vector<MeshAxis>& axes, size_t axis) {
  int stride = 1;
  for (size_t i = axis + 1; i < axes.size(); i++) stride *= axes[i].size;
  return stride;
}

int coordinate(const std::vector<MeshAxis>& axes, int place, size_t axis) {
  return place / stride_of(axes, axis) % axes[axis].size;
}

/// Returns for each rank a number, which is the same for ranks that differ only in these axes.
std::vector<int> colors(const std::vector<MeshAxis>& axes, const std::vector<int>& places, const std::vector<size_t>& along) {
  std::vector<int> result;
  for (int place : places) {
    int color = place;
    for (const auto axis : along) color -= coordinate(axes, place, axis) * stride_of(axes, axis);
    result.push_back(color);
  }
  return result;
}

/// The group of this rank alone.
Communicator alone_in(const Communicator& world) {
  const auto& traits = world.traits();
  const auto device = traits.traces ? c10::Device(c10::kCPU) : traits.device;
  return self_world(world.world_rank(world.local_ranks().front()), device).with_limit(world.limit());
}

/// This rank's group along each axis. An axis of all ranks has the world as its group, and an axis of one rank the group of this rank
/// alone.
std::vector<Communicator> groups_along(const Communicator& world, const std::vector<MeshAxis>& axes, const std::vector<int>& places) {
  std::vector<Communicator> groups;
  for (size_t i = 0; i < axes.size(); i++) {
    if (axes[i].size == world.size()) {
      groups.push_back(world);
    } else if (axes[i].size == 1 && !world.traits().traces) {
      groups.push_back(alone_in(world));
    } else {
      groups.push_back(world.part(colors(axes, places, {i})));
    }
  }
  return groups;
}

}  // namespace

Mesh::Mesh(Communicator world, std::vector<MeshAxis> axes, std::vector<int> places, std::vector<Communicator> groups)
    : world_(std::move(world)), axes_(std::move(axes)), places_(std::move(places)), groups_(std::move(groups)), alone_(alone_in(world_)) {}

Mesh::Mesh(Communicator world) : Mesh(world, {{.name = "shard", .size = world.size()}}, all_ranks(world.size()), {world}) {}

Mesh::Mesh(Communicator world, MeshShape shape)
    : Mesh(std::move(world), {{.name = "replicate", .size = shape.replicate}, {.name = "shard", .size = shape.shard}}) {}

Mesh::Mesh(Communicator world, std::vector<MeshAxis> axes)
    : world_(std::move(world)),
      axes_(checked(world_, std::move(axes))),
      places_(all_ranks(world_.size())),
      groups_(groups_along(world_, axes_, places_)),
      alone_(alone_in(world_)) {}

Mesh Mesh::of_groups(const Communicator& world, const std::vector<std::vector<int>>& groups) {
  const auto refuse = [&](const std::string& why) {
    throw UsageError("groups {} {}; every rank from 0 to {} is in exactly one", fmt::format("{}", groups), why, world.size() - 1);
  };
  std::vector<int> colors(world.size(), -1);
  for (size_t i = 0; i < groups.size(); i++) {
    for (const int rank : groups[i]) {
      if (rank < 0 || rank >= world.size()) refuse(fmt::format("name rank {}, which is not in a world of {}", rank, world.size()));
      auto& color = colors[rank];
      if (color != -1) refuse(fmt::format("have rank {} twice", rank));
      color = static_cast<int>(i);
    }
    if (!std::ranges::is_sorted(groups[i])) refuse(fmt::format("have {} out of order: ranks in a group ascend", groups[i]));
  }
  std::vector<int> missing;
  for (int rank = 0; rank < world.size(); rank++) {
    if (colors[rank] == -1) missing.push_back(rank);
  }
  if (!missing.empty()) refuse("lack " + name_ranks(missing));
  return world.part(colors);
}

Mesh Mesh::by_host(const Communicator& world) {
  const auto& topology = world.topology();
  const auto per_host = topology.ranks_on(0).size();
  std::vector<int> places(world.size());
  std::vector<std::string> hosts;
  bool is_even = true;
  for (int host = 0; host < topology.hosts(); host++) {
    const auto ranks = topology.ranks_on(host);
    is_even = is_even && ranks.size() == per_host;
    hosts.push_back(fmt::format("host {} has {}", host, name_ranks(ranks)));
    for (size_t i = 0; i < ranks.size(); i++) places[ranks[i]] = static_cast<int>(static_cast<size_t>(host) * per_host + i);
  }
  if (!is_even) {
    throw UsageError(
        "a mesh by hosts needs the same number of ranks on each host, but {}; start as many on each, or give the mesh by hand, "
        "as Mesh(world, {{.replicate = 2, .shard = -1}})",
        joined(hosts));
  }
  std::vector<MeshAxis> axes = {{.name = "replicate", .size = topology.hosts()}, {.name = "shard", .size = static_cast<int>(per_host)}};
  auto groups = groups_along(world, axes, places);
  return Mesh(world, std::move(axes), std::move(places), std::move(groups));
}

Mesh Mesh::sub(const std::vector<std::string>& axes) const {
  if (axes.empty()) throw UsageError("a part of the mesh {} needs at least one of its axes", text_of(axes_));
  std::vector<size_t> along;
  std::vector<MeshAxis> kept;
  std::vector<Communicator> groups;
  for (const auto& name : axes) {
    along.push_back(index_of(name));
    kept.push_back(axes_[along.back()]);
    groups.push_back(groups_[along.back()]);
  }
  if (std::ranges::adjacent_find(along, std::greater_equal<>()) != along.end()) {
    throw UsageError("the axes of a part must be named once each, in the order of the mesh, {}; given were {}", text_of(axes_), joined(axes));
  }
  if (kept.size() == axes_.size()) return *this;
  const auto colors = tessera::colors(axes_, places_, along);
  const auto own = colors[world_.local_ranks().front()];
  std::vector<int> places;
  for (size_t rank = 0; rank < places_.size(); rank++) {
    if (colors[rank] != own) continue;
    int place = 0;
    for (size_t i = 0; i < along.size(); i++) place += coordinate(axes_, places_[rank], along[i]) * stride_of(kept, i);
    places.push_back(place);
  }
  auto world = along.size() == 1 ? groups.front() : world_.part(colors);
  return Mesh(std::move(world), std::move(kept), std::move(places), std::move(groups));
}

size_t Mesh::index_of(std::string_view axis) const {
  const auto found = std::ranges::find(axes_, axis, &MeshAxis::name);
  if (found != axes_.end()) return static_cast<size_t>(found - axes_.begin());
  throw UsageError("the mesh has no axis '{}'; it is {}", axis, text_of(axes_));
}

void Mesh::refuse() const {
  throw UsageError(
      "a mesh of {} has too many axes to shard a model over: take one that shards, or one that replicates and one that shards, "
      "as mesh.sub({{\"{}\", \"{}\"}})",
      text_of(axes_), axes_[axes_.size() - 2].name, axes_.back().name);
}

}  // namespace tessera
