// Shards the parts of a decoder besides its layers: the embeddings, the final norm and the head.
#pragma once

#include <string_view>

#include "tessera/models/llama.h"
#include "tessera/shard/options.h"

namespace tessera::llm {

enum class Units {
  Root,          // embeddings, norm and head belong to the outermost unit, as in FSDP2 when only layers are wrapped
  Apart,         // each of the three is a unit
  HeadWithNorm,  // the embeddings are a unit, and norm and head together are another
};
/// Returns the choice with the name root, apart or head-with-norm. Throws ConfigError that lists these names for another name.
Units units_named(std::string_view name);

/// Makes units of embeddings, norm and head. The caller calls fully_shard for the layers, and for the whole model, whose unit gets the
/// rest. Embeddings that are also the head stay in the outermost unit.
void shard_ends(models::LlamaForCausalLM& model, const ShardOptions& options, Units units);

/// Makes a unit of each expert, if the model has any. The caller calls fully_shard for the layers and for the whole model afterwards.
void shard_experts(models::LlamaForCausalLM& model, const ShardOptions& options);

}  // namespace tessera::llm
