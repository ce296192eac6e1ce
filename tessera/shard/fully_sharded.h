// FullyShardedDataParallel: fully_shard as a class, with the names of XlaFullyShardedDataParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/shard/call.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/shard_metadata.h"
#include "tessera/shard/wrap.h"

namespace tessera {

struct FullyShardedOptions {
  /// Whether the unit is resharded between forward and backward.
  bool reshard_after_forward = true;
  /// Whether the root stays unsharded nevertheless, because backward needs it at once.
  bool disable_reshard_on_root = true;
  /// Whether all trainable parameters have one shard, and all frozen ones another (Listing::Flat), in place of one shard for each
  /// parameter.
  bool flatten_parameters = false;
  /// Whether each rank has rows of each parameter (Layout::Rows). on_neuron is the older name.
  bool shard_param_on_dim_0 = false, on_neuron = false;
  /// Pads the part of each rank to a multiple of this many values, 128 unless given. Rows are not padded. An error on engines that keep a
  /// buffer for each parameter, such as those of XLA devices.
  std::optional<int64_t> shard_size_multiple = {};
  /// Decides which inner modules become units of their own; without it, none do.
  std::optional<WrapPolicy> auto_wrap_policy = {};
  /// Parameters that are not sharded; see ShardOptions::ignored.
  std::vector<at::Tensor> ignored_parameters = {};

  /// The dtypes of unsharded parameters and inputs, and of buffers (unless given, compute_dtype): float32, float16 or bfloat16. Shards stay
  /// in float32.
  std::optional<at::ScalarType> compute_dtype = {}, buffer_dtype = {};
  /// Whether gradients in a lower compute_dtype are reduced in float32. Matters only on engines that add in the dtype in which they
  /// send, those of c10d and XLA. All other engines send gradients in their own dtype and add in float32, which gives the same bits.
  bool fp32_reduce_scatter = false;

  /// All ranks of the world, divided into groups that shard independently. Requires sharding_rank and sharding_world_size, which must be
  /// this rank's place in its group and the size of the group.
  std::vector<std::vector<int>> sharding_groups = {};
  std::optional<int> sharding_rank = {}, sharding_world_size = {};

  /// Whether the sharding happens in the constructor. It always does on engines that do not trace, where false is an error.
  bool execute_sharding_on_init = true;
  /// For engines that trace a program; any value is an error on other engines. See TracingOptions: barriers are on unless set to false, and
  /// a program ends after backward only if mark_step_on_finalization is true. The outermost instance decides for a model.
  std::optional<bool> optimization_barrier_in_forward = {}, optimization_barrier_in_backward = {}, mark_step_on_finalization = {};
  /// Must not be true, because all ranks run one program, so layouts need not be pinned. On engines that do not trace, any value is an
  /// error.
  std::optional<bool> pin_layout_in_all_reduce = {}, pin_layout_in_all_gather = {}, pin_layout_in_reduce_scatter = {};

  /// Whether calls return only the sum of the means of all inputs and full parameters, which shows how much memory the parameters take.
  bool debug_dummy_forward_pass = false;
  /// The name of this instance in messages. With debug_print, each call logs (LogLevel::Info) the memory that the process takes.
  std::string debug_msg = "fsdp";
  bool debug_print = false;
  /// Whether collectives move no data, which shows what they cost: the group is then a fake_world of the same size. Set all three or none.
  bool debug_dummy_all_gather_op = false, debug_dummy_all_reduce_op = false, debug_dummy_reduce_scatter_op = false;
  /// Whether to leave out the optimization barriers that no option above sets. Engines that do not trace have no barriers.
  bool debug_dummy_optimization_barrier_op = false;
};

/// The part of FullyShardedDataParallel<M> that does not depend on M.
class FullySharded {
 public:
  const FullyShardedOptions& options() const { return options_; }
  /// The ranks among which the module is sharded.
  const Communicator& world() const { return world_; }

  /// Like tessera::parameters: the parameters to give to an optimizer.
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> params_with_grad() const;
  /// Like tessera::clip_grad_norm over all parameters. Collective.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2) const;
  /// The same. Throws UsageError unless `groups` are the sharding groups: norms are always added over these.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type, const std::vector<std::vector<int>>& groups) const;

  /// Like tessera::no_sync for this module.
  NoSync no_sync() const;
  void set_gradient_divide_factors(double pre, double post, Recurse recurse = Recurse::Yes) const;
  ShardMetadata get_shard_metadata() const;
  /// All shards in the module, also those of inner units, under their names in the module.
  std::vector<std::pair<std::string, at::Tensor>> get_original_names_and_sharded_parameters() const;

  friend std::ostream& operator<<(std::ostream& out, const FullySharded& sharded);

 protected:
  FullySharded(std::shared_ptr<torch::nn::Module> module, bool has_forward, const Communicator& world, FullyShardedOptions options);

  /// Logs when a call begins and when it ends.
  class Report {
   public:
    explicit Report(const FullySharded& of);
    Report(const Report&) = delete;
    Report& operator=(const Report&) = delete;
    ~Report();

   private:
    const FullySharded& of_;
  };
  at::Tensor dummy_forward(const std::vector<at::Tensor>& inputs) const;
  [[noreturn]] static void refuse_dummy_forward();

 private:
  struct Simulated;  // shared by all instances of a group

  void print(const std::string& what) const;
  /// Whether the unit reshards after forward, which changes when it becomes the root or a part of a model.
  bool reshards_after_forward() const;

  std::shared_ptr<torch::nn::Module> base_;
  FullyShardedOptions options_;
  std::shared_ptr<const Simulated> simulated_;
  Communicator world_;
};

/// A sharded module that is called through this class: a value, cheap to copy. M is a module holder or a shared_ptr. The module keeps
/// its names, so an outer model registers it as `register_module("block", sharded.ptr())` and keeps this object to call it.
template <class M>
class FullyShardedDataParallel : public FullySharded {
 public:
  using Module = ModuleOf<M>;

  /// Makes a unit of the parameters that belong to no unit yet. They must be float32. Collective.
  FullyShardedDataParallel(M module, const Communicator& world, FullyShardedOptions options = {})
      : FullySharded(pointer_of(module), HasForward<Module>, world, std::move(options)), module_(std::move(module)) {}

  /// Calls the module like tessera::call, which casts inputs to the compute_dtype.
  template <class... Inputs>
  auto forward(Inputs&&... inputs) const {
    using Output = decltype(call(module_, std::forward<Inputs>(inputs)...));
    const Report report(*this);
    if (options().debug_dummy_forward_pass) {
      if constexpr (std::is_same_v<Output, at::Tensor>) {
        std::vector<at::Tensor> tensors;
        (collect(inputs, tensors), ...);
        return dummy_forward(tensors);
      } else {
        refuse_dummy_forward();
      }
    }
    return call(module_, std::forward<Inputs>(inputs)...);
  }
  template <class... Inputs>
  auto operator()(Inputs&&... inputs) const {
    return forward(std::forward<Inputs>(inputs)...);
  }

  const M& module() const { return module_; }
  std::shared_ptr<Module> ptr() const { return pointer_of(module_); }
  Module* operator->() const { return &*ptr(); }
  Module& operator*() const { return *ptr(); }
  /// The module at this index of a Sequential.
  auto operator[](size_t index) const
    requires requires(Module& module) { module[index]; }
  {
    return (**this)[index];
  }

 private:
  template <class T>
  static void collect(T value, std::vector<at::Tensor>& tensors) {
    for_each_tensor_in(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }

  M module_;
};

}  // namespace tessera
