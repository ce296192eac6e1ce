// Shards the parameters of a module, in place. The one call that makes a model too large for one worker trainable.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

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

/// Makes one unit of all parameters of the module that are in no unit yet; shard inner modules first, the whole model last. The module
/// itself is used as before: its parameters are gathered when an operator needs them. `parameters()` returns this rank's shards.
/// A module without parameters of its own gets no unit, and no collective. Every rank calls it with the same module and options.
void fully_shard(torch::nn::Module& module, const ShardOptions& options);
void fully_shard(std::span<const std::shared_ptr<torch::nn::Module>> modules, const ShardOptions& options);

/// Always throws UsageError: scripts keep their parameters to themselves.
[[noreturn]] void fully_shard(const torch::jit::Module& script, const ShardOptions& options);

/// For module holders (`Linear`, `auto model = Llama(config)`) and shared pointers.
template <class Holder>
requires requires(Holder holder) {
  holder->parameters();
}
void fully_shard(Holder holder, const ShardOptions& options) {
  fully_shard(static_cast<torch::nn::Module&>(*holder), options);
}

}  // namespace tessera
