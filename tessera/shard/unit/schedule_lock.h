// The lock of a schedule, which is the key to the state of its units.
#pragma once

#include <mutex>

namespace tessera {

class Schedule;

/// While it exists, no other thread uses the units of the schedule. One thread may hold several.
class [[nodiscard]] ScheduleLock {
 public:
  bool is_of(const Schedule& schedule) const { return schedule_ == &schedule; }

 private:
  friend class Schedule;
  ScheduleLock(const Schedule& schedule, std::recursive_mutex& mutex) : schedule_(&schedule), lock_(mutex) {}

  const Schedule* schedule_;
  std::unique_lock<std::recursive_mutex> lock_;
};

}  // namespace tessera
