// Unit: the parameters that are unsharded, resharded and reduced together.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/shard/options.h"
#include "tessera/shard/paging/paged_tensor.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/unit/candidate.h"
#include "tessera/shard/unit/layout.h"
#include "tessera/shard/unit/schedule_lock.h"
#include "tessera/shard/unit/unit_memory.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Schedule;
class UnitState;
class Starts;

/// What one unit cost this rank since the last reset.
struct UnitCounters {
  uint64_t gathers = 0;
  uint64_t reductions = 0;
  uint64_t gathered_bytes = 0;  // received from other ranks
  uint64_t cancelled = 0;       // prefetches that were resharded before they were used
};

/// The layout of a unit, after Layout::Auto has been resolved. PaddedChunks: each parameter by itself in equal chunks, for a process that
/// represents several ranks.
enum class UnitLayout { Flat, Rows, WholeParameters, PaddedChunks };

/// The dtype to which floating-point operands of a unit's operators are cast, if any.
std::optional<at::ScalarType> compute_dtype_of(const ShardOptions& options);

/// A module whose options act where it is called, so that operators may use its parameters only while its forward runs. Of a unit of
/// several modules, any of them.
struct NeededCall {
  std::vector<const torch::nn::Module*> modules;  // only compared
  std::string name;
  std::string_view option;
  std::string_view other_way = {};           // to do what the option does
  bool with_graph_only = false;              // the option does nothing where no graph is built
  std::vector<const void*> parameters = {};  // Unit::Parameters, only compared: those that it is about; all of them, if empty
};

/// This class holds what stays the same while a model trains. What changes is in UnitState, which needs the lock of the unit's schedule.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  struct Parameter {
    std::string name;                           // in the largest module that fully_shard has seen so far
    std::string local_name;                     // in the module from which the unit was made
    std::vector<std::string> other_names = {};  // of a tied parameter, in that module
    size_t index = 0;                           // Candidate::index
    at::Tensor shard;                           // a leaf, with as many dimensions as the parameter
    std::vector<int64_t> sizes, strides;
    Span span;
    OriginPtr origin;  // marks local values that are computed from the shard
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> unsharded;
    mutable bool unset = false;  // it had no values when it was sharded, and nobody has written any since
  };

  /// Parameters of one dtype that were all trainable or all frozen when the unit was made. They share one flat buffer.
  struct Group {
    at::ScalarType dtype = at::kFloat, unsharded_dtype = at::kFloat;
    at::ScalarType gradient_dtype = at::kFloat;  // of the sharded gradients
    int64_t chunk = 0;    // values of one rank
    at::Tensor own = {};  // this rank's chunk, flat and without the paging key
    c10::weak_intrusive_ptr<TaggedStorage> unsharded{TaggedStoragePtr()};
    std::vector<Parameter> parameters = {};
    std::optional<Parameter> flat = {};  // Listing::Flat only: listed in place of the parameters, which all have its shard as theirs
    uint64_t fingerprint = 0;            // of the full parameters from which this rank made the group
    bool optimizers_cast = false;        // our optimizers can write the cast copy of this group along with the shards

    /// The storage of this rank's chunk; the shards are views of it.
    TaggedStorage& own_storage() const { return *tagged_storage(flat ? flat->shard : parameters.front().shard); }
  };

  /// Makes a unit of the candidates. Their tensors stay the same objects, but lose their former memory.
  static std::shared_ptr<Unit> make(std::string name, std::vector<Candidate> candidates, const ShardOptions& options,
                                    std::shared_ptr<Schedule> schedule);

  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  ~Unit();

  /// The path of its module in the model. Until an outer fully_shard call reveals the path, it is the class name of the module.
  const std::string& name() const { return name_; }
  void rename(const std::string& name);
  /// Renames the parameter whose unsharded form or shard this tensor is.
  void rename_parameter(const at::Tensor& tensor, std::string name);
  /// A number that distinguishes units with the same name. It is the same on all ranks.
  uint64_t number() const { return number_; }
  const Mesh& mesh() const { return options_.mesh; }
  const ShardOptions& options() const { return options_; }
  const std::vector<Group>& groups() const { return groups_; }
  size_t number_of(const Group& group) const { return static_cast<size_t>(&group - groups_.data()); }
  const Codec& codec() const { return *codec_; }
  std::optional<at::ScalarType> compute_dtype() const { return compute_dtype_; }
  /// The calls that operators need around them, by tessera::call or the class FullyShardedDataParallel.
  const std::vector<NeededCall>& needed_calls() const { return needed_calls_; }
  void need(const NeededCall& call) { needed_calls_.push_back(call); }
  /// The memory that the unit additionally takes on this rank while it is unsharded.
  uint64_t unsharded_bytes() const { return unsharded_bytes_; }
  /// The memory that it takes now beyond its shards.
  uint64_t held_bytes() const;
  std::string_view residence() const;
  std::string_view layout_name() const;

  const std::shared_ptr<Schedule>& schedule() const { return schedule_; }
  /// Moves the unit to the schedule of a larger model. Must not be called while either model is in use.
  void join(std::shared_ptr<Schedule> schedule);
  /// The root of a model is the unit of the outermost module. A model has none if its modules leave no parameter for it.
  bool is_root() const { return is_root_; }
  void become_root() { is_root_ = true; }
  /// Whether it stays unsharded between forward and backward.
  bool stays_after_forward(const ScheduleLock& held);
  /// Collective.
  void set_reshard_after_forward(ReshardAfterForward rule);
  /// Throws std::logic_error if the lock is another schedule's. The state must not be used longer than the lock is held.
  UnitState& state(const ScheduleLock& held) {
    if (!held.is_of(*schedule_)) refuse_lock();
    return *state_;
  }
  UnitState& state(ScheduleLock&& held) = delete;

  const UnitCounters& counters() const { return counters_; }
  void reset_counters() { counters_ = {}; }

  /// The parameter whose unsharded form or shard this tensor is. Null if it is neither.
  const Parameter* find(const at::Tensor& tensor) const;
  /// The parameter in whose unsharded form, shard or gradient the view begins. The view must lie in memory of this unit.
  const Parameter* around(const at::Tensor& view) const;
  /// The parameters that have values in a shard, or in a view of one: several only with Listing::Flat.
  std::vector<const Parameter*> parameters_in(const at::Tensor& shard) const;
  /// The values of a parameter that its shard holds: one range for each rank that this process represents, without padding.
  std::vector<ValueRange> ranges_of(const Parameter& parameter) const;
  const Parameter& operator[](const Origin& origin) const { return groups_[origin.group].parameters[origin.parameter]; }

  /// A pinned unit stays unsharded. It is pinned with the lock of its schedule, and unpinned without.
  bool pinned() const { return pins_ > 0; }
  void pin(const ScheduleLock& held) {
    if (!held.is_of(*schedule_)) refuse_lock();
    pins_++;
  }
  void unpin() { pins_--; }
  /// Called before an operator that builds a graph uses an unsharded parameter or a view of one. Applies changes of requires_grad since the
  /// last pass to all parameters at once, so that a pass has one node and one reduction for the unit.
  void follow_training(const at::Tensor& used);
  /// Whether the unsharded parameters have the dtype and the values of the shards now, instead of those that operators usually compute with.
  bool shows_stored() const { return shows_stored_; }
  /// Makes backward an error for graphs that have saved a parameter to which `written` belongs: a shard, a view of one, or undefined for
  /// all.
  void outdate(const at::Tensor& written);
  /// Whether some parameter has no values yet, because it was on the meta device and nobody initialised or loaded it.
  bool has_unset() const { return unset_ > 0; }
  /// Somebody has written the parameter.
  void note_values(const Parameter& parameter);
  /// Somebody has written this shard, or a view of one.
  void note_values(const at::Tensor& shard);
  /// The names of such parameters.
  std::vector<std::string> unset_names() const;
  /// Throws UsageError if there are any: `what` needs their values.
  void expect_values(std::string_view what) const;
  /// The same, if this shard, or view of one, has any part in them.
  void expect_values_of(const at::Tensor& shard, std::string_view what) const;
  /// How often tessera::recover has dropped the unit's gradients.
  uint64_t recoveries() const { return recoveries_; }
  void count_recovery() { recoveries_++; }
  /// Whether a reduction of its gradients has started and not finished.
  bool is_reducing() const;
  /// Makes reductions also compute sums of squares from now on, because a norm of the gradients was requested.
  void compute_squares();

 private:
  friend class UnitState;
  friend class Versions;
  friend class GradientReduction;

  Unit(std::string name, const ShardOptions& options, UnitLayout layout, CodecPtr codec);

  [[noreturn]] static void refuse_lock();

  // Used while the unit is made; defined in build_unit.cpp.
  BufferLayout layout(std::span<const Candidate> candidates) const;
  BufferPlan plan(std::span<const Candidate> candidates) const;
  c10::Device device_of(const Candidate& candidate) const;
  struct Prepared;
  Prepared prepare(std::vector<Candidate> candidates, size_t number, MemoryPtr memory, Starts& starts);
  void add_group(Prepared prepared);
  TaggedStoragePtr make_storage(Role role, size_t group, int64_t numel, at::ScalarType dtype, c10::Device device);

  // Used by UnitState and its parts.
  using Buffers = c10::SmallVector<Buffer, 2>;
  Buffers buffers() const;
  Subject subject() const;
  void count_gather();
  void count_reduction() { counters_.reductions++; }
  void count_cancelled() { counters_.cancelled++; }

  std::string name_;
  const ShardOptions options_;
  const UnitLayout layout_;
  const CodecPtr codec_;
  const std::optional<at::ScalarType> compute_dtype_;
  std::vector<NeededCall> needed_calls_;
  const uint64_t number_;
  std::vector<Group> groups_;
  std::unordered_map<const c10::TensorImpl*, Parameter*> parameters_;  // keyed by every unsharded parameter and every shard
  uint64_t unsharded_bytes_ = 0;
  std::shared_ptr<Schedule> schedule_;
  bool is_root_ = false;
  std::unique_ptr<UnitState> state_;
  UnitCounters counters_;
  std::atomic<int> pins_ = 0, unset_ = 0;
  std::atomic<bool> shows_stored_ = false;
  std::atomic<uint64_t> recoveries_ = 0;
  std::atomic<uint64_t> followed_ = 0;  // the pass in which follow_training() last looked at all parameters
};

/// The unit, group and parameter whose unsharded form or shard a tensor is. All null if it is neither.
struct Located {
  std::shared_ptr<Unit> unit;
  const Unit::Group* group = nullptr;
  const Unit::Parameter* parameter = nullptr;
};
Located locate(const at::Tensor& tensor);

}  // namespace tessera
