// ShardOptions: what a caller of fully_shard can choose about a unit.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/comm/mesh.h"
#include "tessera/shard/codec.h"

namespace tessera {

/// The dtypes of unsharded parameters and of gradients in transit. Shards always keep the dtype of the model's parameters.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = {};   // the dtype in which parameters are all-gathered and used
  std::optional<at::ScalarType> reduce_dtype = {};  // the dtype in which gradients are sent, if it is narrower; sums are at least float32
};

/// How all ranks come to start with the same parameters.
enum class Start {
  Equal,      // they already do (same seed, same file); this is checked at the first use, and the error names the unit that differs
  FromRank0,  // rank 0 broadcasts its parameters
};

/// What `parameters()` lists of a sharded module.
enum class Listing {
  ByName,  // one shard for each parameter, under the parameter's name
  Flat,    // one flat shard for all trainable parameters and one for all frozen ones: flat_param_0, flat_param_1 (more with several dtypes)
};

/// Where unsharded parameters lie.
enum class Residence {
  Auto,        // what TESSERA_RESIDENCE says (auto, gathered, node-shared); by default node-shared where that is possible
  Gathered,    // an all-gather copies them into private memory of each rank
  NodeShared,  // the ranks of one host share one copy; ConfigError where that is not possible
};

/// How the parameters of a unit are divided among ranks.
enum class Layout {
  Auto,  // what the transport prefers: flat, unless one process represents all ranks
  Flat,  // one buffer for all parameters, split into equal chunks at any value: the least padding and the fewest operations
  Rows,  // each parameter by itself, split between rows of the dimension that is outermost in memory: dim 0, as in FSDP2, unless transposed
  WholeParameters,  // each parameter belongs to one rank
};

/// What a caller of fully_shard can choose about a unit.
struct ShardOptions {
  Mesh mesh;
  MixedPrecision mixed_precision = {};
  Start start = Start::Equal;
  Listing listing = Listing::ByName;
  Residence residence = Residence::Auto;
  Layout layout = Layout::Auto;
  /// The form in which values are sent and computed with. Replaces mixed_precision.param_dtype; giving both is an error. A codec that
  /// decodes needs gathered memory.
  CodecPtr codec = {};
  /// Parameters that are not sharded. Whoever trains them averages their gradients over the ranks.
  std::vector<at::Tensor> ignored = {};
  /// Parameters that are left for a unit of a module further out, such as tied ones.
  std::vector<at::Tensor> left_out = {};
  /// How many units may be unsharded at once while their order of uses is not known yet. With 1 there is no prefetch, even when the order
  /// is known. The outermost fully_shard call decides for a model with several units; modules of a world that are one unit each share the
  /// bound of the first.
  int max_live_units = 2;
};

}  // namespace tessera
