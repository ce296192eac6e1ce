#include "tessera/shard/strategy.h"

#include <map>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera {
namespace {

const std::map<std::string, ShardingStrategy, std::less<>>& strategies() {
  static const std::map<std::string, ShardingStrategy, std::less<>> names = {
      {"FULL_SHARD", ShardingStrategy::FullShard},
      {"SHARD_GRAD_OP", ShardingStrategy::ShardGradOp},
      {"NO_SHARD", ShardingStrategy::NoShard},
      {"HYBRID_SHARD", ShardingStrategy::HybridShard},
      {"HYBRID_SHARD_ZERO2", ShardingStrategy::HybridShardZero2},
      {"_HYBRID_SHARD_ZERO2", ShardingStrategy::HybridShardZero2},  // the name of the enumerator in PyTorch
  };
  return names;
}

}  // namespace

ShardOptions sharding_strategy(const Communicator& world, ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::FullShard:
      return {.mesh = world};
    case ShardingStrategy::ShardGradOp:
      return {.mesh = world, .reshard_after_forward = false};
    case ShardingStrategy::NoShard:
      return {.mesh = Mesh(world, {.replicate = world.size(), .shard = 1})};
    case ShardingStrategy::HybridShard:
      return {.mesh = Mesh::by_host(world)};
    case ShardingStrategy::HybridShardZero2:
      return {.mesh = Mesh::by_host(world), .reshard_after_forward = false};
  }
  throw UsageError("{} is not a ShardingStrategy", static_cast<int>(strategy));
}

ShardOptions sharding_strategy(const Communicator& world, std::string_view name) {
  if (const auto found = strategies().find(name); found != strategies().end()) return sharding_strategy(world, found->second);
  std::vector<std::string> known;
  for (const auto& [each, strategy] : strategies()) known.push_back(each);
  const auto nearest = nearest_name(name, known);
  throw UsageError("'{}' is not a sharding strategy{}; there are {}", name, nearest.empty() ? "" : " (did you mean " + nearest + "?)",
                   joined(known));
}

}  // namespace tessera
