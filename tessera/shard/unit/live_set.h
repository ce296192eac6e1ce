// The unsharded units of a model: how many there may be, which go first, and which come early.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

class ScheduleLock;
class Unit;
class UseOrder;
struct Fault;

/// What the unsharded units of a model cost together since the last reset.
struct LiveCounters {
  uint64_t live_bytes = 0;  // now
  uint64_t peak_bytes = 0;
};

/// Every call needs the lock of the schedule that has the units.
class LiveSet {
 public:
  explicit LiveSet(int max_live_units) : max_live_units_(max_live_units) {}

  /// Begins to unshard a unit, unless somebody has, and notes that it is used now.
  void unshard(const ScheduleLock& held, Unit& unit, const Fault& fault);
  void reshard(const ScheduleLock& held, Unit& unit);
  /// Reshards units that are not pinned until there is room for those that are wanted, and for the next one to come.
  void evict(const ScheduleLock& held, std::span<Unit* const> wanted, const UseOrder& order);
  /// Begins to unshard the unit that is used next, if that is known.
  void prefetch(const ScheduleLock& held, const UseOrder& order);
  /// Reshards all that is not pinned.
  void reshard_all(const ScheduleLock& held);
  /// The unit is no part of the model any more.
  void forget(const Unit& unit);

  const LiveCounters& counters() const { return counters_; }
  void reset_counters() { counters_.peak_bytes = counters_.live_bytes; }

 private:
  Unit* next_to_unshard(const ScheduleLock& held, const UseOrder& order) const;

  const int max_live_units_;
  std::vector<Unit*> live_;  // the least recently used first
  std::vector<Unit*> idle_;  // those that evict() may reshard: empty between calls, and kept for its memory
  LiveCounters counters_;
};

}  // namespace tessera
