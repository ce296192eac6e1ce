// The unsharded units of a model: bounds their number, chooses which one to reshard, and prefetches the next one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

class ScheduleLock;
class Unit;
class UseOrder;
struct Fault;

/// The memory of all unsharded units of a model together.
struct LiveCounters {
  uint64_t live_bytes = 0;  // at the moment
  uint64_t peak_bytes = 0;  // the most since the last reset
};

/// The caller of any member function holds the lock of the units' schedule.
class LiveSet {
 public:
  explicit LiveSet(int max_live_units) : max_live_units_(max_live_units) {}

  /// Starts to unshard a unit if it is sharded, and makes it the most recently used one.
  void unshard(const ScheduleLock& held, Unit& unit, const Fault& fault);
  void reshard(const ScheduleLock& held, Unit& unit);
  /// Reshards units that are not pinned, so that the wanted units and the one to be prefetched fit within the bound.
  void evict(const ScheduleLock& held, std::span<Unit* const> wanted, const UseOrder& order);
  /// Starts to unshard the unit that is used next, if the order predicts one.
  void prefetch(const ScheduleLock& held, const UseOrder& order);
  /// Reshards all units that are not pinned.
  void reshard_all(const ScheduleLock& held);
  /// Removes a unit that no longer belongs to the model.
  void forget(const Unit& unit);

  const LiveCounters& counters() const { return counters_; }
  void reset_counters() { counters_.peak_bytes = counters_.live_bytes; }

 private:
  Unit* next_to_unshard(const ScheduleLock& held, const UseOrder& order) const;

  const int max_live_units_;
  std::vector<Unit*> live_;  // the least recently used first
  std::vector<Unit*> idle_;  // used inside evict() only; a member so that its memory is reused
  LiveCounters counters_;
};

}  // namespace tessera
