// When the units of a model are whole: bounded before their order of use is known, and freed after the last use once it is.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace tessera {

class Unit;
struct Fault;

/// What the units of a model cost together since the last reset.
struct ScheduleCounters {
  uint64_t live_bytes = 0;  // of whole units, now
  uint64_t peak_bytes = 0;
  uint64_t misses = 0;  // uses that the recorded order did not foresee
};

/// One per model. The order of uses is recorded while units are read; the pass after a complete one is predicted from it. A wrong
/// prediction costs a gather, never a wrong number.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(int max_live_units) : max_live_units_(max_live_units) {}

  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(mutex_); }

  /// The units of one operator are about to be used: makes them whole, pins them, frees what is not needed any more, and begins to
  /// bring in what comes next.
  void use(std::span<Unit* const> units, const Fault& fault);
  void release(std::span<Unit* const> units);
  /// The unit's gradients are complete and on their way: its part in this backward pass is over.
  void reduces(Unit& unit);
  /// Waits for gradients that are on their way.
  void finish_reductions();
  /// A shard of the unit is about to be written.
  void about_to_write(Unit& unit);
  /// This rank will write the shards of the unit before it reads it again.
  void done_reading(Unit& unit);
  /// And does so now, with all that others read of them (see Unit::cast_copy).
  void about_to_update(Unit& unit);
  /// Throws UsageError if the unit is in use as a whole.
  void expect_writable(const Unit& unit) const;
  /// This rank leaves out a step that others take.
  void skip_update(Unit& unit);
  /// A raw pointer to shards of the unit is asked for.
  void hand_out_pointer(Unit& unit);
  /// And it has written all that it will. (After other writes, nobody knows before the next read.)
  void publish_early(Unit& unit);
  /// The engine is through with a backward pass, or has given up, perhaps long ago.
  void end_backward(uint64_t number);
  /// An exception has ended the pass: its gradients, and what was under way to become some, are dropped.
  void abandon_pass();
  /// Frees all that is not pinned.
  void free_all();
  /// The unit goes to another schedule.
  void hand_over(Unit& unit);
  /// A unit died.
  void forget(const Unit& unit);

  /// Counts the passes that have begun and ended. Without the lock.
  uint64_t pass_number() const { return pass_number_; }

  const ScheduleCounters& counters() const { return counters_; }
  void reset_counters();

 private:
  enum class Pass { None, Training, Evaluation, Backward };
  /// The order in which units were used in one kind of pass: what the last complete one did, and what this one has done so far.
  struct Order {
    std::vector<Unit*> recorded;
    std::vector<Unit*> current;
    bool trusted = false;  // a complete pass is recorded, and this one has followed it so far
    size_t next = 0;       // as long as it is: the place in `recorded`

    std::span<Unit* const> to_come() const { return trusted ? std::span(recorded).subspan(next) : std::span<Unit* const>(); }
    /// Whether the uses so far end with the same pass twice; it becomes the record.
    bool learn_from_repetition();
  };

  Pass pass_now() const;
  Order& order(Pass pass) { return orders_[static_cast<size_t>(pass)]; }
  void enter(Pass pass);
  void record(Unit& unit);
  void evict(std::span<Unit* const> wanted);
  void unshard(Unit& unit, const Fault& fault);
  void prefetch();
  /// At the next read of any unit.
  void expect_to_publish(Unit& unit);
  void publish(Unit& unit);
  Unit* next_to_unshard();
  void reshard(Unit& unit);

  std::recursive_mutex mutex_;
  const int max_live_units_;
  std::vector<Unit*> live_;     // units in memory, the least recently used first
  std::vector<Unit*> idle_;     // those of them that evict() may give back; kept for its memory
  Unit* reducing_ = nullptr;    // whose gradients are on their way
  std::vector<Unit*> written_;  // not published yet
  Unit* visited_ = nullptr;     // the last one used
  Pass pass_ = Pass::None;
  std::atomic<uint64_t> pass_number_ = 1;
  uint64_t backward_ = 0;  // the number of the last backward pass
  Order orders_[4];
  ScheduleCounters counters_;
};

}  // namespace tessera
