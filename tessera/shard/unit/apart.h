// The parameters that a caller of fully_shard names one by one, because they are not sharded with the rest of their module.
#pragma once

#include <span>

#include "tessera/shard/options.h"

namespace torch::nn {
class Module;
}

namespace tessera {

bool is_in(std::span<const at::Tensor> tensors, const at::Tensor& tensor);

/// Throws UsageError unless each tensor in `ignored`, `replicated` and `left_out` is a parameter of the modules, in no unit yet, and named
/// only once.
void expect_apart(std::span<torch::nn::Module* const> modules, const ShardOptions& options);

/// The options for a part of a model: of `ignored`, `replicated` and `left_out` only what expect_apart accepts for these modules.
ShardOptions options_for(std::span<torch::nn::Module* const> modules, ShardOptions options);

}  // namespace tessera
