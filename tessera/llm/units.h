// Which parts of a decoder are units, besides its layers.
#pragma once

#include <string_view>

#include "tessera/models/llama.h"
#include "tessera/shard/options.h"

namespace tessera::llm {

enum class Units {
  Root,          // embeddings, norm and head are one unit with whatever else is left, as in FSDP2 when only layers are wrapped
  Apart,         // each of the three is one
  HeadWithNorm,  // the embeddings are one, and norm and head together another
};
/// root, apart, head-with-norm. Throws ConfigError, with these names, for another one.
Units units_named(std::string_view name);

/// Makes units of embeddings, norm and head. The caller shards the layers, and the outermost fully_shard the rest. Embeddings that are also
/// the head stay in the outermost unit.
void shard_ends(models::LlamaForCausalLM& model, const ShardOptions& options, Units units);

}  // namespace tessera::llm
