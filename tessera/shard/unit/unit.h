// Unit: the parameters that are unsharded, resharded and reduced together.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/base/tensor_slice.h"
#include "tessera/base/weak_tensor.h"
#include "tessera/shard/custom_reduction.h"
#include "tessera/shard/memory/unit_memory.h"
#include "tessera/shard/options.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/layout.h"
#include "tessera/shard/unit/managed_parameter.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Schedule;
class Unit;
class UnitState;
class Starts;

/// The lock of a schedule, which Unit::state() requires. While it exists, no other thread uses the units of the schedule. One thread may
/// hold several such locks.
class [[nodiscard]] ScheduleLock {
 public:
  /// Throws std::logic_error if this is the lock of another schedule.
  void expect_of(const Schedule* schedule) const {
    if (schedule_ != schedule) throw std::logic_error("the state of a unit was asked for with the lock of another schedule");
  }

 private:
  friend class Schedule;
  ScheduleLock(const Schedule& schedule, std::recursive_mutex& mutex) : schedule_(&schedule), lock_(mutex) {}

  const Schedule* schedule_;
  std::unique_lock<std::recursive_mutex> lock_;
};

/// The costs of one unit on this rank since the last reset. Changed only under the lock of the unit's schedule.
struct UnitCounters {
  uint64_t gathers = 0;
  uint64_t reductions = 0;
  uint64_t gathered_bytes = 0;  // received from other ranks
  uint64_t cancelled = 0;       // prefetches that were resharded before they were used
};

/// The settings of a unit that can be changed after it was made.
struct UnitSettings {
  ReshardAfterForward reshard_after_forward = {};
  bool reshard_after_backward = true;
  bool gradient_sync = true;  // whether backward reduces gradients
  int no_sync = 0;            // how many guards of no_sync exist
  bool all_reduce = true;     // whether backward takes the mean over replicas
  std::optional<DivideFactors> divide = {};
  ReductionHook reduction_hook = {};
  bool syncs() const { return gradient_sync && no_sync == 0; }
  /// The units that are prefetched when this unit is used, in place of the units that the learned order predicts.
  std::vector<std::weak_ptr<Unit>> forward_prefetch = {}, backward_prefetch = {};
};

/// Facts about a unit that threads may read without the lock of its schedule.
struct UnitFlags {
  std::atomic<int> pins = 0;                // a pinned unit stays unsharded
  std::atomic<int> unset = 0;               // how many parameters were on the meta device and have not been initialised or loaded since
  std::atomic<bool> shows_stored = false;   // the unsharded parameters have the dtype and the values of the shards now
  std::atomic<bool> is_reducing = false;    // a reduction of its gradients has started and not finished
  std::atomic<uint64_t> recoveries = 0;     // how often tessera::recover has dropped its gradients
  std::atomic<uint64_t> followed_pass = 0;  // the last pass in which follow_training() has looked for changes of requires_grad

  bool is_pinned() const { return pins > 0; }
};

/// The layout of a unit, after Layout::Auto has been resolved. PaddedChunks: each parameter by itself in equal chunks, for a process that
/// represents several ranks.
enum class UnitLayout { Flat, Rows, WholeParameters, PaddedChunks };
inline constexpr std::string_view kLayoutNames[] = {"flat", "rows", "whole parameters", "padded chunks"};

/// The dtype to which floating-point operands of a unit's operators are cast, if any.
std::optional<at::ScalarType> compute_dtype_of(const ShardOptions& options);

/// A call of a module (of any of `modules`, if a unit was made of several) inside which the unit's operators have to run, because an option
/// of the module acts at that call: operators may use the parameters only while the forward of one of these modules runs.
struct NeededCall {
  std::vector<const torch::nn::Module*> modules;  // only compared by address, like the modules in `inner`
  std::vector<const torch::nn::Module*> inner =
      {};  // if one of these submodules is called outside of the needed call, the option does nothing, and a warning says so once
  std::shared_ptr<std::atomic<bool>> is_said = {};
  std::string name;
  std::string_view option;
  std::string_view other_way = {};           // text for the error: another way to get the effect of the option
  bool with_graph_only = false;              // the option does nothing where no graph is built
  std::vector<const void*> parameters = {};  // addresses of the Unit::Parameters that need the call; if empty, all parameters need it
};

/// Holds the facts about a unit that stay the same while a model trains. UnitState, which can be accessed only with the lock of the unit's
/// schedule, holds the rest.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  struct Parameter {
    mutable std::string name;                   // the name in the largest module that fully_shard has seen so far
    std::string local_name;                     // the name in the module from which the unit was made
    std::vector<std::string> other_names = {};  // the further names of a tied parameter in that module
    size_t index = 0;                           // ManagedParameter::index
    at::Tensor shard;                           // a leaf, with as many dimensions as the parameter
    std::vector<int64_t> sizes, strides;
    Span span;
    /// The values that the shard holds: one range for each rank that this process represents, without padding.
    std::vector<ValueRange> ranges = {};
    SourceParameterPtr source = {};  // marks local values that are computed from the shard
    WeakTensor unsharded = {};
    mutable bool unset = false;  // the parameter had no values when it was sharded, and nobody has written any since

    /// Returns the parameter's part of `whole`, the unsharded form of its group, in the parameter's shape.
    at::Tensor in(const at::Tensor& whole) const { return whole.as_strided(sizes, strides, span.offset); }
    /// Returns the parameter's part of `own`, a flat tensor in the layout of a rank's chunk.
    at::Tensor in_chunk(const at::Tensor& own) const { return own.narrow(0, span.shard_offset, span.shard_numel); }
  };

  /// Parameters of one dtype that were all trainable or all frozen when the unit was made. They share one flat buffer.
  struct Group {
    at::ScalarType dtype = at::kFloat, unsharded_dtype = at::kFloat;
    at::ScalarType gradient_dtype = at::kFloat;  // the dtype of the gradients of shards
    int64_t chunk = 0;                           // number of values of each rank
    at::Tensor own = {};                         // this rank's chunk, flat and without the paging key
    c10::weak_intrusive_ptr<TaggedStorage> unsharded{TaggedStoragePtr()};
    std::vector<Parameter> parameters = {};
    std::optional<Parameter> flat = {};  // Listing::Flat only: listed in place of the parameters, which all share its shard
    uint64_t fingerprint = 0;            // a hash of the full parameters from which this rank made the group
    bool converts = false;               // operators usually compute with another form of the values than the shards hold
    bool optimizers_cast = false;        // Tessera's optimizers can write the group's cast copy along with the shards
    size_t number = 0;                   // index in the unit

    /// The storage of this rank's chunk; the shards are views of it.
    TaggedStorage& own_storage() const { return *tagged_storage(listed().front().shard); }
    /// The entries of the group that `parameters()` lists, each with a shard of its own.
    std::span<const Parameter> listed() const { return flat ? std::span(&*flat, 1) : std::span(parameters); }
  };

  /// Makes a unit of these parameters. Their tensors stay the same objects, but lose their former memory. The caller adds it to a schedule,
  /// which gives it a state. Collective.
  static std::shared_ptr<Unit> make(std::string name, std::vector<ManagedParameter> managed, const ShardOptions& options);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  /// The path of its module in the model. Until an outer fully_shard call reveals the path, it is the class name of the module.
  const std::string& name() const { return name_; }
  void rename(const std::string& name);
  /// A number that distinguishes units with the same name. It is the same on all ranks.
  uint64_t number() const { return number_; }
  const Mesh& mesh() const { return *options_.mesh; }
  const ShardOptions& options() const { return options_; }
  const std::vector<Group>& groups() const { return groups_; }
  std::optional<at::ScalarType> compute_dtype() const { return compute_dtype_; }
  /// The device on which operators compute with the unsharded parameters.
  c10::Device device() const { return device_; }
  /// Whether the shards and their gradients are in host memory while a device computes with the unit.
  bool is_offloaded() const { return options_.offload.parameters == OffloadTo::Host; }
  /// The module calls inside which operators have to run. tessera::call and FullyShardedDataParallel make such calls.
  std::vector<NeededCall>& needed_calls() { return needed_calls_; }
  std::string_view layout_name() const { return kLayoutNames[static_cast<size_t>(layout_)]; }

  UnitMemory& memory() { return memory_; }
  /// Returns the buffers of the groups, except groups whose unsharded parameters no module holds any more.
  Buffers buffers() const;
  /// A storage for a group, without memory.
  TaggedStoragePtr make_storage(Role role, size_t group, int64_t numel, at::ScalarType dtype);
  /// Moves this rank's chunk of a group into private memory.
  void make_chunk_private(size_t group);

  /// Called by a schedule that takes the unit. The first schedule also gives the unit a state.
  void attach(std::shared_ptr<Schedule> schedule, std::shared_ptr<UnitState> state) {
    schedule_ = std::move(schedule);
    if (state) state_ = std::move(state);
  }
  const std::shared_ptr<Schedule>& schedule() const { return schedule_; }
  /// Throws std::logic_error if the lock is another schedule's. The state must not be used longer than the lock is held.
  UnitState& state(const ScheduleLock& held) {
    held.expect_of(schedule_.get());
    return *state_;
  }
  UnitState& state(ScheduleLock&& held) = delete;
  UnitCounters& counters() { return counters_; }
  UnitFlags& flags() const { return flags_; }

  /// Returns the parameter whose unsharded form or shard this tensor is. Null if it is neither.
  const Parameter* find(const at::Tensor& tensor) const;
  /// The parameter in whose unsharded form, shard or gradient the view begins. The view must lie in memory of this unit.
  const Parameter* around(const at::Tensor& view) const;
  using Parameters = c10::SmallVector<const Parameter*, 2>;
  /// Returns the parameters that have values in `view`: a shard, a view of a shard, or a flat tensor over neighbouring shards. For an empty
  /// shard, returns the shard's parameter.
  Parameters parameters_in(const at::Tensor& view) const;
  /// Makes backward an error for graphs that have saved a parameter to which `written` belongs. `written`: a shard or a view of a shard;
  /// undefined for all parameters of the unit.
  void outdate(const at::Tensor& written);

 private:
  Unit(std::string name, uint64_t number, const ShardOptions& options, UnitLayout layout, CodecPtr codec, UnitMemory memory,
       c10::Device device);

  // Used while the unit is made; defined in build_unit.cpp.
  struct Prepared;
  Prepared prepare(std::span<const ManagedParameter> managed, const BufferLayout& layout, size_t number, MemoryPtr memory, Starts& starts);
  void add_group(Prepared prepared);

  std::string name_;
  const ShardOptions options_;
  const UnitLayout layout_;
  const CodecPtr codec_;
  const std::optional<at::ScalarType> compute_dtype_;
  const c10::Device device_;
  const uint64_t number_;
  UnitMemory memory_;
  std::vector<NeededCall> needed_calls_;
  std::vector<Group> groups_;
  std::unordered_map<const c10::TensorImpl*, const Parameter*> parameters_;  // keyed by every unsharded parameter and every shard
  UnitCounters counters_;
  mutable UnitFlags flags_;
  std::shared_ptr<Schedule> schedule_;
  std::shared_ptr<UnitState> state_;  // a shared_ptr, because UnitState is incomplete here
  friend class Schedule;              // a schedule uses the state under its own lock
};

/// The unit, group and parameter to which an unsharded parameter or a shard belongs. All null for any other tensor.
struct Located {
  std::shared_ptr<Unit> unit;
  const Unit::Group* group = nullptr;
  const Unit::Parameter* parameter = nullptr;
};
Located locate(const at::Tensor& tensor);

/// The parameters of all groups of a unit.
inline auto parameters_of(const Unit& unit) {
  return unit.groups() | std::views::transform(&Unit::Group::parameters) | std::views::join;
}
inline const Unit::Parameter& parameter_of(const Unit& unit, const SourceParameter& source) {
  return unit.groups()[source.group].parameters[source.parameter];
}
/// Notes that a parameter has values now. To be called when a parameter that was on the meta device when its unit was made has been
/// written.
void note_values(const Unit& unit, const Unit::Parameter& parameter);
/// The same for the parameters to which `shard`, a written shard or a view of a shard, belongs.
void note_values(const Unit& unit, const at::Tensor& shard);
/// Throws UsageError if parameters of the unit were on the meta device and nobody has written them since. `what`: the operation that needs
/// their values, for the error.
void expect_values(const Unit& unit, std::string_view what);
/// The same, but only for the parameters to which `shard`, a shard or a view of a shard, belongs.
void expect_values_of(const Unit& unit, const at::Tensor& shard, std::string_view what);

/// Returns a name for messages, such as "'layers.3.weight' of unit 'layers.3'".
std::string name_of(const Unit::Parameter& parameter, const Unit& unit);

}  // namespace tessera
