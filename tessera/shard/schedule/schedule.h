// Decides when the units of a model are unsharded and resharded, and when their reductions finish and their new versions are published.
#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tessera/base/no_copy.h"
#include "tessera/base/sweep.h"
#include "tessera/shard/gradients/gradient_watch.h"
#include "tessera/shard/options.h"
#include "tessera/shard/schedule/use_order.h"
#include "tessera/shard/unit/unit.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct ModelFigures;
struct UnitFigures;

using WeakModule = std::weak_ptr<const torch::nn::Module>;

/// Settings for all units of a model, from the outermost fully_shard call.
struct ScheduleSettings : ScheduleOptions {
  /// `is_model`: whether the units belong to one model, and not to several modules that only have the same world. `is_divided`: whether
  /// some units are sharded over only a part of the world's ranks.
  ScheduleSettings(const ShardOptions& options, bool is_model, bool is_divided)
      : ScheduleOptions(options.schedule), world(options.mesh->world()), is_model(is_model), is_divided(is_divided) {}

  Communicator world;
  bool is_model, is_divided;
};

/// The memory that all unsharded units of a model take together.
struct LiveCounters {
  uint64_t live_bytes = 0;  // at the moment
  uint64_t peak_bytes = 0;  // the most since the last reset
};

/// Schedules the units of one model or, for units that belong to no model of several units, all such units of a world. Records the order in
/// which units are used, and predicts each pass from the last complete pass of the same kind; a wrong prediction costs an all-gather, but
/// never changes a result. Bounds the number of unsharded units, chooses which unit to reshard, and prefetches the next units.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(const ScheduleSettings& settings) : settings_(settings), watch_(std::make_shared<GradientWatch>(settings.world)) {}

  /// The ranks of the model: the ranks over which the outermost fully_shard call has sharded it.
  const Communicator& world() const { return settings_.world; }
  /// Whether some units of the model are sharded over only a part of these ranks. Such units have different parameters on each part of the
  /// ranks, even under equal names. The answer is the same on all ranks, also on ranks that have no such unit.
  bool is_divided() const { return settings_.is_divided; }

  ScheduleLock lock() { return {*this, mutex_}; }
  /// The same lock in a type that WriteGuard can store without including this header. It gives no access to the state of units.
  std::unique_lock<std::recursive_mutex> exclusive() { return std::unique_lock(mutex_); }

  /// Called before an operator uses units: unshards and pins them, reshards units that are no longer needed, and prefetches the next units.
  void use(std::span<Unit* const> units, std::span<at::Tensor> operands);
  /// Removes the pins that use() has set.
  void release(std::span<Unit* const> units);

  /// Looks for trained tensors that are in no unit (see TrainedBeside). Called in each graph of a backward pass before the gradients of a
  /// unit are reduced.
  void look_at_graph() {
    const auto held = lock();
    watch_->beside.look_at_graph();
  }
  /// Called when this pass has computed all gradients of the unit, and has started to reduce them or keeps them unreduced. Reshards the
  /// unit, unless the rest of backward is known to need it.
  void gradients_complete(Unit& unit);
  /// Whether units are reduced in an order that does not depend on what a pass uses, because unused parameters count as zero.
  bool reduces_in_order() const { return settings_.unused_parameters == UnusedParameters::Zeros; }
  /// Runs `reduce`, the reduction of a unit, once all units before it in the order have been reduced.
  void reduce_in_order(Unit& unit, std::function<void()> reduce);
  /// Waits for the reduction that was started last, if it has not finished, and for gradients that are on their way to host memory.
  void finish_reductions();
  /// Waits only for the reduction that was started last, not for copies to host memory.
  void finish_sum();

  /// Remembers a module for which fully_shard was called.
  void watch(WeakModule module);
  /// Returns the watched modules at the first call within a pass or between two passes, and nothing at later calls.
  std::span<const WeakModule> watched_once();
  /// Throws UsageError if a unit of the model has unsynced gradients.
  void expect_synced();
  /// Throws UsageError if the unit is pinned.
  void expect_writable(const Unit& unit) const;
  /// Tells the other ranks that this rank will not read the unit again before its shards change. Reshards the unit unless it is pinned.
  void done_reading(Unit& unit);
  /// Remembers that the unit was written. Its new version is published before any unit of the schedule is used next.
  void note_written(Unit& unit);
  /// Publishes the new version of the unit at once.
  void flush(Unit& unit);

  /// Called when the autograd engine has completed a backward pass or has given it up. Ignored if a later pass has begun since.
  void end_backward(uint64_t number, bool complete);
  /// Called after an exception has ended a pass: forgets the pass, drops its reductions and reshards all units that are not pinned.
  void abandon_pass();

  /// Starts to unshard a unit before an operator needs it. The unit stays unsharded at least until its first use.
  void prefetch(Unit& unit);
  void wait_for(Unit& unit);
  void reshard(Unit& unit);
  /// Reshards all units that are not pinned. Does nothing if units are reduced in order, because they then stay unsharded until backward
  /// ends.
  void reshard_all();
  /// Adds a unit that has no schedule yet, and gives it a state. The schedule forgets the unit when the unit is destroyed.
  void add(Unit& unit);
  /// Adds a unit of another schedule. Throws UsageError if it is pinned.
  void take_over(Unit& unit);

  /// A number that changes whenever a pass begins or ends. Needs no lock.
  uint64_t pass_number() const { return pass_number_; }

  const LiveCounters& live_counters() const { return live_counters_; }
  /// Returns a unit of the same model that is not in `units`. Null if there is none.
  const Unit* member_outside(std::span<const std::shared_ptr<Unit>> units) const;
  /// The number of uses that the recorded order did not predict.
  uint64_t misses() const { return misses_; }
  void reset_counters();

 private:
  using Units = c10::SmallVector<Unit*, 4>;

  // The caller of a private function holds the lock.
  static UnitState& state_of(const Unit& unit) { return *unit.state_; }
  void join(Unit& unit, std::shared_ptr<UnitState> state);
  /// Adds the figures of the units to those of this rank.
  void count(ModelFigures& figures);
  std::vector<UnitFigures> figures_of_members() const;
  /// `held_bytes`: the memory that the unit has beyond its shards.
  void forget(const Unit& unit, uint64_t held_bytes);
  Pass pass_now() const;
  UseOrder& order(Pass pass) { return orders_[static_cast<size_t>(pass)]; }
  /// The order of this pass.
  const UseOrder& order() const { return orders_[static_cast<size_t>(pass_)]; }
  void enter(Pass pass);
  void visit(Unit& unit);
  void reduce_next(bool all);
  void wait_and_pin(std::span<Unit* const> units);
  void tie_to_reduced(std::span<at::Tensor> operands);

  template <class Change>
  void change(const Unit& unit, const Change& change);
  /// Starts to unshard a unit if it is sharded, and makes it the most recently used unit.
  void unshard(Unit& unit, std::span<at::Tensor> operands);
  /// Reshards units that are not pinned, so that the wanted units and the units to be prefetched fit within the bound.
  void make_room(std::span<Unit* const> wanted);
  /// Units to prefetch that have no memory yet, in the recorded order.
  Units predicted() const;
  bool prefetches_on_use() const;
  /// Starts to unshard the units in this unit's own prefetch list or, if that is empty, the units that the recorded order predicts.
  void prefetch_after_use(Unit& unit, std::span<at::Tensor> operands);
  void prefetch(std::span<Unit* const> units, std::span<at::Tensor> operands);
  /// Whether the settings, or a prefetch that was asked for, keep the unit unsharded for now. Such units do not count for the bound.
  bool stays(const Unit& unit) const;
  int64_t bounded() const;
  int64_t most() const { return settings_.max_live_units + (order().is_predicted() ? 1 : 0); }
  /// Reshards the units that are not pinned and for which `chosen` returns true.
  void reshard_where(c10::function_ref<bool(Unit&)> chosen);

  const ScheduleSettings settings_;
  std::recursive_mutex mutex_;
  std::vector<Unit*> live_;    // unsharded, the least recently used first
  std::vector<Unit*> partly_;  // partly resharded
  std::vector<Unit*> idle_;    // used inside make_room() only; a member so that its memory is reused
  LiveCounters live_counters_;
  UseOrder orders_[4] = {UseOrder(Pass::None), UseOrder(Pass::Training), UseOrder(Pass::Evaluation), UseOrder(Pass::Backward)};
  Pass pass_ = Pass::None;
  std::atomic<uint64_t> pass_number_ = 1;
  uint64_t backward_ = 0;            // the number of the last backward pass
  Unit* visited_ = nullptr;          // the last unit used
  Unit* reducing_ = nullptr;         // the unit whose reduction was started last and has not finished
  std::vector<at::Tensor> reduced_;  // in a trace: the results of the last reduction, until an operator is tied to them
  std::vector<Unit*> arriving_;      // units whose gradients are on their way to host memory
  std::vector<Unit*> written_;       // units with a new version that is not published yet
  uint64_t misses_ = 0;
  const std::shared_ptr<GradientWatch> watch_;
  std::vector<Unit*> members_;
  std::shared_ptr<const std::vector<UnitFigures>> figures_;  // of the members; null until they are counted
  bool is_recorded_ = false;  // whether the record of this rank knows the schedule
  Sweep sweep_;
  std::vector<WeakModule> watched_;
  uint64_t looked_at_ = 0;  // pass_number() at the last watched_once()
  /// For a backward pass that reduces in order: the units that have not been reduced yet (the next one at the end), and the reductions that
  /// are ready to run.
  std::vector<Unit*> to_reduce_;
  std::map<const Unit*, std::vector<std::function<void()>>> ready_;
};

/// The state of a unit, with the lock of its schedule as long as the object exists.
class LockedState : NoCopy {
 public:
  explicit LockedState(Unit& unit) : held_(unit.schedule()->lock()), state_(unit.state(held_)) {}
  UnitState* operator->() const { return &state_; }
  UnitState& operator*() const { return state_; }

 private:
  const ScheduleLock held_;
  UnitState& state_;
};

}  // namespace tessera
