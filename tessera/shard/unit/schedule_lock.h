// The lock of a schedule, which is the key to the state of its units.
#pragma once

#include <mutex>
#include <stdexcept>

namespace tessera {

class Schedule;

/// While it exists, no other thread uses the units of the schedule. One thread may hold several.
class [[nodiscard]] ScheduleLock {
 public:
  /// Throws std::logic_error if it is the lock of another schedule.
  void expect_of(const Schedule* schedule) const {
    if (schedule_ != schedule) throw std::logic_error("the state of a unit was asked for with the lock of another schedule");
  }

 private:
  friend class Schedule;
  ScheduleLock(const Schedule& schedule, std::recursive_mutex& mutex) : schedule_(&schedule), lock_(mutex) {}

  const Schedule* schedule_;
  std::unique_lock<std::recursive_mutex> lock_;
};

}  // namespace tessera
