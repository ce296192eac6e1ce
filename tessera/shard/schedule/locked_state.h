// LockedState: the state of a unit, with the lock of its schedule as long as the object exists.
#pragma once

#include "tessera/base/no_copy.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"

namespace tessera {

class LockedState : NoCopy {
 public:
  explicit LockedState(Unit& unit) : held_(unit.schedule()->lock()), state_(unit.state(held_)) {}
  UnitState* operator->() const { return &state_; }
  UnitState& operator*() const { return state_; }
  const ScheduleLock& lock() const { return held_; }

 private:
  const ScheduleLock held_;
  UnitState& state_;
};

}  // namespace tessera
