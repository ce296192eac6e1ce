#include "tessera/shard/shard_metadata.h"

#include <torch/nn/module.h>

#include <nlohmann/json.hpp>

#include "tessera/comm/communicator.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

ShardMetadata::Flat flat_of(const Unit::Group& group) {
  ShardMetadata::Flat flat;
  for (const auto& parameter : group.parameters) {
    flat.names.push_back(parameter.local_name);
    flat.shapes.push_back(parameter.sizes);
    flat.numels.push_back(parameter.span.numel);
  }
  return flat;
}

}  // namespace

ShardMetadata shard_metadata(ConstModuleRef module, const Communicator& world) {
  ShardMetadata result{.world_size = world.size(), .rank = world.local_ranks().front()};
  for (const auto& [name, shard] : named_parameters(module)) {
    const auto found = locate(shard);
    if (found.parameter == nullptr) continue;
    result.shard_info[found.unit->name()].push_back(
        {.name = found.parameter->local_name, .original_name = name, .original_size = found.parameter->sizes});
    if (found.group->flat) result.flatten_info[name] = flat_of(*found.group);
  }
  for (const auto& item : module->named_buffers()) {
    if (item.value().defined() && is_cast_buffer(item.value())) result.buffer_info[item.key()] = original_dtype(item.value());
  }
  return result;
}

std::string ShardMetadata::to_json() const {
  using nlohmann::json;
  auto shards = json::object(), flats = json::object(), buffers = json::object();
  for (const auto& [unit, own] : shard_info) {
    auto& of_unit = shards[unit] = json::object();
    for (const auto& shard : own) of_unit[shard.name] = {{"_orig_name", shard.original_name}, {"_orig_size", shard.original_size}};
  }
  for (const auto& [name, flat] : flatten_info) flats[name] = {{"names", flat.names}, {"shapes", flat.shapes}, {"numels", flat.numels}};
  for (const auto& [name, dtype] : buffer_info) buffers[name] = {{"_orig_dtype", c10::toString(dtype)}};
  return json{{"shard_info", shards}, {"flatten_info", flats}, {"buffer_info", buffers}, {"world_size", world_size}, {"rank", rank}}.dump();
}

}  // namespace tessera
