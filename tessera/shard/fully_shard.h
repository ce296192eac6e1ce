// fully_shard: shards the parameters of a module in place, so that a model too large for one rank can be trained.
#pragma once

#include <memory>
#include <span>

#include "tessera/base/module_ref.h"
#include "tessera/shard/options.h"

namespace torch {
namespace jit {
struct Module;
}
namespace nn {
class Module;
}
}  // namespace torch

namespace tessera {

/// Makes one unit of all parameters of the module that belong to no unit yet. Call it on inner modules first and on the model last. The
/// module is used as before: its parameters are unsharded when an operator needs them, and `parameters()` returns this rank's shards. If no
/// parameter is left for a unit, no unit is made and nothing is communicated. Collective: every rank passes the same module and options.
void fully_shard(ModuleRef module, const ShardOptions& options = {});
void fully_shard(std::span<const std::shared_ptr<torch::nn::Module>> modules, const ShardOptions& options = {});

/// Always throws UsageError: the interpreter of a TorchScript module holds the parameters itself, so they can't be sharded.
[[noreturn]] void fully_shard(const torch::jit::Module& script, const ShardOptions& options = {});

}  // namespace tessera
