// When the units of a model are unsharded, and in which order their gradients and writes go their way.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tessera/shard/unit/live_set.h"
#include "tessera/shard/unit/use_order.h"

namespace tessera {

class Schedule;

/// While it lives, no other thread uses the units of the schedule. A thread may have several.
class [[nodiscard]] ScheduleLock {
 public:
  bool is_of(const Schedule& schedule) const { return schedule_ == &schedule; }

 private:
  friend class Schedule;
  ScheduleLock(const Schedule& schedule, std::recursive_mutex& mutex) : schedule_(&schedule), lock_(mutex) {}

  const Schedule* schedule_;
  std::unique_lock<std::recursive_mutex> lock_;
};

/// One per model. It records the order of uses while units are used; a pass is predicted from the last complete one of its kind. A wrong
/// prediction costs a gather, never a wrong number.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(int max_live_units) : live_(max_live_units) {}

  ScheduleLock lock() { return {*this, mutex_}; }
  /// The same, for those who do not look into units.
  std::unique_lock<std::recursive_mutex> exclusive() { return std::unique_lock(mutex_); }

  /// The units of one operator are about to be used: unshards and pins them, reshards what is not needed any more, and begins to unshard
  /// what comes next.
  void use(std::span<Unit* const> units, const Fault& fault);
  void release(std::span<Unit* const> units);

  /// The unit's gradients are complete and on their way, so its part in this backward pass is over.
  void gradients_sent(Unit& unit);
  /// Waits for gradients that are on their way.
  void finish_reductions();

  /// Throws UsageError if the unit is in use unsharded.
  void expect_writable(const Unit& unit) const;
  /// This rank does not read the unit again before its shards change.
  void done_reading(Unit& unit);
  /// The unit was written, so its new version is due when any unit is used next.
  void expect_to_publish(Unit& unit);
  void publish(Unit& unit);

  /// The engine is through with a backward pass, or has given up, perhaps long ago.
  void end_backward(uint64_t number);
  /// An exception has ended the pass: its gradients, and what was under way to become some, are dropped.
  void abandon_pass();

  void reshard(Unit& unit);
  /// Reshards all that is not pinned.
  void reshard_all();
  /// The unit goes to another schedule.
  void hand_over(Unit& unit);
  /// A unit died.
  void forget(const Unit& unit);

  /// Counts the passes that have begun and ended. Without the lock.
  uint64_t pass_number() const { return pass_number_; }

  const LiveCounters& live_counters() const { return live_.counters(); }
  /// Uses that the recorded order did not foresee.
  uint64_t misses() const { return misses_; }
  void reset_counters();

 private:
  enum class Pass { None, Training, Evaluation, Backward };

  Pass pass_now() const;
  UseOrder& order(Pass pass) { return orders_[static_cast<size_t>(pass)]; }
  void enter(Pass pass);
  void visit(const ScheduleLock& held, Unit& unit);
  void wait_and_pin(const ScheduleLock& held, std::span<Unit* const> units);

  std::recursive_mutex mutex_;
  LiveSet live_;
  UseOrder orders_[4];
  Pass pass_ = Pass::None;
  std::atomic<uint64_t> pass_number_ = 1;
  uint64_t backward_ = 0;       // the number of the last backward pass
  Unit* visited_ = nullptr;     // the last unit used
  Unit* reducing_ = nullptr;    // whose gradients are on their way
  std::vector<Unit*> written_;  // not published yet
  uint64_t misses_ = 0;
};

}  // namespace tessera
