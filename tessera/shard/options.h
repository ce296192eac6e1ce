// ShardOptions: what a caller of fully_shard can choose about a unit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/mesh.h"
#include "tessera/shard/offload.h"

namespace tessera {

class Codec;

/// The dtypes of unsharded parameters and of gradients. Shards always keep the dtype of the model's parameters.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = {};   // the dtype in which parameters are all-gathered and used
  std::optional<at::ScalarType> reduce_dtype = {};  // the dtype in which gradients are sent; ignored if it is wider than the gradients,
                                                    // unless the engine adds in the dtype that it sends
  /// The dtype of the gradients of shards, if it is wider than the shards: float32 gradients of bfloat16 parameters, so that sums over
  /// passes, norms and clipping are not rounded.
  std::optional<at::ScalarType> grad_dtype = {};
  std::optional<at::ScalarType> buffer_dtype = {};  // the dtype of floating-point buffers
  /// The next two options act where Tessera sees calls of the module: at tessera::call and at the class FullyShardedDataParallel. In a
  /// plain call each operator casts its operands; a module for which one of the two options is set refuses plain calls.
  std::optional<bool> cast_forward_inputs = {};     // whether inputs are cast to param_dtype; unset: they are
  std::optional<at::ScalarType> output_dtype = {};  // the dtype to which floating-point outputs are cast
};

/// Whether a unit is resharded between its last use in forward and its first use in backward.
class ReshardAfterForward {
 public:
  /// The root of a model stays unsharded, because backward needs it at once. All other units are resharded.
  constexpr ReshardAfterForward() = default;
  /// true: the unit is resharded. false: it stays unsharded until backward, which takes more memory and saves one all-gather.
  constexpr ReshardAfterForward(bool reshards) : ranks_(reshards ? kAllRanks : 1) {}  // NOLINT(google-explicit-constructor)
  /// The unit is resharded to groups of `ranks` consecutive ranks of the shard group: each group keeps one copy, which its ranks all-gather
  /// in backward.
  constexpr ReshardAfterForward(int ranks) : ranks_(ranks) {}  // NOLINT(google-explicit-constructor)

  /// Whether the unit stays unsharded between forward and backward.
  constexpr bool keeps(bool is_root) const { return ranks_ ? *ranks_ == 1 : is_root; }
  /// The number of ranks over which the unit is sharded between forward and backward, if it does not stay unsharded. `all`: the size of the
  /// shard group.
  constexpr int ranks(int all) const { return ranks_.value_or(kAllRanks) == kAllRanks ? all : *ranks_; }

 private:
  static constexpr int kAllRanks = std::numeric_limits<int>::min();
  std::optional<int> ranks_ = {};
};

/// When backward unshards the unit that it needs next.
enum class BackwardPrefetch {
  Pre,   // before the gradients of the present unit are computed: the most overlap
  Post,  // after the present unit has been resharded: less memory
  None,  // when an operator needs it
};

/// What happens to parameters that a backward pass used on other ranks but not on this one.
enum class UnusedParameters {
  Refuse,  // an error on all ranks that names the parameters
  /// Their gradient on this rank counts as zero. Units are then reduced in a fixed order, which may delay some of them, and stay unsharded
  /// from forward to backward.
  Zeros,
};

/// How all ranks come to start with the same parameters.
enum class Start {
  Equal,      // they have the same parameters already (same seed, same file); checked at the first use, and the error names the unit that
              // differs
  FromRank0,  // rank 0 broadcasts its parameters; the parameters of other ranks need no values
  Loaded,     // tensors without values, such as those from deferred_init, stay without values until they are loaded: recorded operators are
              // not run
};

/// Fills a parameter or a buffer of this name. `values` is the whole tensor, with memory whose values are not defined.
using InitFunction = std::function<void(const std::string& name, at::Tensor& values)>;

/// How `parameters()` lists the shards of a module.
enum class Listing {
  ByName,  // one shard for each parameter, under the parameter's name
  Flat,    // one flat shard for all trainable parameters and one for all frozen ones: flat_param_0, flat_param_1 (more with several dtypes)
};

/// Where unsharded parameters are stored.
enum class Residence {
  Auto,        // node-shared where that is possible and all ranks are on one host
  Gathered,    // an all-gather copies them into private memory of each rank
  NodeShared,  // the ranks of each host share one copy; ConfigError where that is not possible
};

/// How the parameters of a unit are divided among ranks.
enum class Layout {
  Auto,  // what the transport prefers: flat, unless one process represents all ranks
  Flat,  // one buffer for all parameters, split into equal chunks at any value: the least padding and the fewest operations
  Rows,  // each parameter by itself, split between rows of the dimension that is outermost in memory: dim 0, as in FSDP2, unless transposed
  WholeParameters,  // each parameter belongs to one rank
};

/// Options of engines that trace a step and compile it as one program, such as XLA. Other engines ignore them.
struct TracingOptions {
  /// Whether an optimization barrier ties an all-gather to the operands of the operator that needs it. Without it, a compiler may gather
  /// all units at once, and reuse in backward the parameters that forward gathered: this saves all-gathers, but memory grows with the
  /// number of units. In backward, the barrier also ties operators to the reduced gradients of the last unit but one, so that at most two
  /// units have whole gradients at once.
  bool barrier_in_forward = true, barrier_in_backward = true;
  /// Whether the program ends with the backward pass, so that the optimizer's step is another program.
  bool cuts_after_backward = false;
  /// Whether fully_shard runs what it has traced, so that the whole parameters are gone when it returns.
  bool cuts_after_sharding = true;
};

/// How the units of a whole model are unsharded one after the other. The outermost fully_shard call decides for all of them.
struct ScheduleOptions {
  /// How many units may be unsharded at once while their order of uses is not known yet. With 1 there is no prefetch, even when the order
  /// is known. Units that belong to no model share one bound in each world: that of the first such unit.
  int max_live_units = 2;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::Pre;
  bool forward_prefetch = true;
  /// How many units ahead are prefetched: 1 unless given. An engine that traces, such as XLA, prefetches only if this is given. It then
  /// ties the all-gather of a unit to the operands of the unit before. This overlaps more on GPUs, but takes memory for as many additional
  /// units.
  std::optional<int> prefetch_depth = {};
  /// Whether prefetched units count for max_live_units, so that a prefetch waits until there is room.
  bool limit_all_gathers = true;
  UnusedParameters unused_parameters = UnusedParameters::Refuse;
  TracingOptions tracing = {};
};

/// Whether a setting that is changed later is for the unit of a module only, or also for all units below it.
enum class Recurse { No, Yes };

/// What a caller of fully_shard can choose about a unit.
struct ShardOptions {
  /// The ranks among which the unit is sharded: a Communicator or a Mesh. Unset: the world that `init` returned last, or, in the options
  /// that a policy returns for a module, the mesh of the model.
  std::optional<Mesh> mesh = {};
  MixedPrecision mixed_precision = {};
  Start start = Start::Equal;
  /// Fills the parameters of this call that are on the meta device, one after the other, and meta buffers for which nothing is recorded.
  /// Without it, the values are computed as deferred_init has recorded, or have to be loaded before the first use.
  InitFunction param_init_fn = {};
  Listing listing = Listing::ByName;
  std::optional<Residence> residence = {};  // unset: the value of TESSERA_RESIDENCE, or else Auto
  Layout layout = Layout::Auto;
  OffloadOptions offload = {};
  /// Converts parameters to the form in which they are sent, and to the form with which operators compute. Replaces
  /// mixed_precision.param_dtype; giving both is an error. A codec that decodes needs gathered memory.
  std::shared_ptr<const Codec> codec = {};
  /// Returns the dimension that Layout::Rows splits, like FSDP2's shard_placement_fn; if it returns nothing, Layout::Rows splits the
  /// outermost dimension in memory.
  std::function<std::optional<int64_t>(const std::string& name, const at::Tensor& parameter)> shard_dim = {};
  /// With Layout::Flat: the part of each rank is padded to a multiple of this many values.
  int64_t shard_size_multiple = 1;
  /// Parameters that are not sharded. A program that trains them has to average their gradients (average_gradients). Buffers in the list
  /// keep their dtype.
  std::vector<at::Tensor> ignored = {};
  /// Parameters that every rank keeps whole. Their gradients are averaged by an all-reduce.
  std::vector<at::Tensor> replicated = {};
  /// Parameters, such as tied ones, that are left for the unit of an outer module.
  std::vector<at::Tensor> left_out = {};
  ReshardAfterForward reshard_after_forward = {};
  ScheduleOptions schedule = {};
};

}  // namespace tessera
