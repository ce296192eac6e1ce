// What a caller can choose about a unit.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/comm/mesh.h"
#include "tessera/shard/codec.h"

namespace tessera {

/// Shards stay in the dtype of the model's parameters; these are for the time when a unit is whole.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = {};   // in which parameters are gathered and used
  std::optional<at::ScalarType> reduce_dtype = {};  // in which gradients travel, if narrower than they are; added in at least float32
};

/// How it comes about that all ranks begin with the same parameters.
enum class Start {
  Equal,      // they do already (same seed, same file); compared at the first use, and refused by name if not
  FromRank0,  // rank 0's are sent to the others
};

/// What `parameters()` lists of a sharded module.
enum class Listing {
  ByName,  // a shard for each parameter, under its name
  Flat,    // one vector of all that trains and one of all that does not: flat_param_0 and flat_param_1 (more with several dtypes)
};

/// Where parameters are while a unit is whole.
enum class Residence {
  Auto,        // node-shared where it can be, or what TESSERA_RESIDENCE names (auto, gathered, node-shared)
  Gathered,    // an all-gather brings them into memory of each rank
  NodeShared,  // ranks of one host have one copy in memory that all see; refused where they can't
};

/// How the parameters of a unit are divided among ranks.
enum class Layout {
  Auto,             // as the transport prefers: flat, unless one process stands for all ranks
  Flat,             // one buffer for all, cut into equal chunks anywhere: the least padding and the fewest operations
  Rows,             // each parameter by itself, between rows of dim 0, as FSDP2 does
  WholeParameters,  // each parameter on one rank
};

struct ShardOptions {
  Mesh mesh;
  MixedPrecision mixed_precision = {};
  Start start = Start::Equal;
  Listing listing = Listing::ByName;
  Residence residence = Residence::Auto;
  Layout layout = Layout::Auto;
  /// In which form values are sent and computed with, if that is not what mixed_precision says. Where it decodes, parameters are gathered.
  CodecPtr codec = {};
  /// Parameters to leave as they are, whole on every rank. Who trains them averages their gradients.
  std::vector<at::Tensor> ignored = {};
  /// How many units may be whole at once as long as their order of use is not known yet. With 1, none is brought in early later on.
  /// Of a model it is what the outermost fully_shard call says.
  int max_live_units = 2;
};

}  // namespace tessera
