// The sharding strategies of PyTorch FSDP by name.
#pragma once

#include <string_view>

#include "tessera/shard/options.h"

namespace tessera {

/// Each strategy is a mesh and a rule for resharding, which sharding_strategy() returns as options.
enum class ShardingStrategy {
  FullShard,         // all ranks share one copy, which is resharded after forward
  ShardGradOp,       // the same, but units stay unsharded until backward
  NoShard,           // every rank keeps a whole copy, as in data-parallel training
  HybridShard,       // FullShard among the ranks of a host, copies on all hosts
  HybridShardZero2,  // ShardGradOp among the ranks of a host, copies on all hosts
};

/// Returns options with the mesh and the rule of a strategy, for all units of a model; set the other options as usual. Collective. Throws
/// UsageError for a hybrid strategy if hosts differ in their number of ranks.
ShardOptions sharding_strategy(const Communicator& world, ShardingStrategy strategy);
/// The same by PyTorch's name: "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2".
ShardOptions sharding_strategy(const Communicator& world, std::string_view name);

}  // namespace tessera
