// The unsharded units of a model: bounds their number, chooses which one to reshard, and prefetches the next ones.
#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/shard/schedule/schedule_settings.h"
#include "tessera/shard/schedule/use_order.h"

namespace tessera {

class ScheduleLock;
class Unit;
struct Fault;

/// The memory of all unsharded units of a model together.
struct LiveCounters {
  uint64_t live_bytes = 0;  // at the moment
  uint64_t peak_bytes = 0;  // the most since the last reset
};

/// The caller of any member function holds the lock of the units' schedule.
class LiveSet {
 public:
  explicit LiveSet(const ScheduleSettings& settings) : settings_(settings) {}

  /// Starts to unshard a unit if it is sharded, and makes it the most recently used one.
  void add(const ScheduleLock& held, Unit& unit, const Fault& fault);
  void remove(const ScheduleLock& held, Unit& unit);
  /// Reshards units that are not pinned, so that the wanted units and those to be prefetched fit within the bound.
  void make_room(const ScheduleLock& held, std::span<Unit* const> wanted, const UseOrder& order);
  /// Called when `unit` is used, by the fault: starts to unshard the units of its own list or, without one, those that the order predicts.
  void prefetch(const ScheduleLock& held, Unit& unit, const Fault& fault, const UseOrder& order);
  /// The same after `unit` was resharded in backward, for BackwardPrefetch::Post.
  void prefetch_after(const ScheduleLock& held, Unit& unit, const UseOrder& order);
  /// Reshards all units that are not pinned.
  void remove_all(const ScheduleLock& held);
  /// The same, but leaves units whose rule keeps them unsharded after backward.
  void end_backward(const ScheduleLock& held);
  /// Removes a unit that no longer belongs to the model.
  void forget(const Unit& unit, uint64_t held_bytes);

  const LiveCounters& counters() const { return counters_; }
  void reset_counters() { counters_.peak_bytes = counters_.live_bytes; }

 private:
  using Units = c10::SmallVector<Unit*, 4>;
  /// Units to prefetch that have no memory yet, in the recorded order.
  Units predicted(const ScheduleLock& held, const UseOrder& order) const;
  void start(const ScheduleLock& held, std::span<Unit* const> units, const Fault& fault, const UseOrder& order);
  bool prefetches_on_use(const UseOrder& order) const;
  /// Whether the unit's rule keeps it unsharded. Such units do not count for the bound.
  bool stays(const ScheduleLock& held, Unit& unit, const UseOrder& order) const;
  int64_t bounded(const ScheduleLock& held, const UseOrder& order) const;
  int64_t most(const UseOrder& order) const;
  void remove_where(const ScheduleLock& held, c10::function_ref<bool(Unit&)> chosen);
  template <class Change>
  void change(const ScheduleLock& held, Unit& unit, const Change& change);

  const ScheduleSettings& settings_;
  std::vector<Unit*> live_;    // the least recently used first
  std::vector<Unit*> partly_;  // partly resharded
  std::vector<Unit*> idle_;    // used inside make_room() only; a member so that its memory is reused
  LiveCounters counters_;
};

}  // namespace tessera
