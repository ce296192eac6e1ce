#include "tessera/shard/access/write_guard.h"

#include <algorithm>

#include "tessera/shard/access/gradients.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

/// The schedules of the units, sorted, so that guards of several threads lock them in the same order and can't deadlock.
c10::SmallVector<Schedule*, 4> schedules_of(std::span<const std::shared_ptr<Unit>> units) {
  c10::SmallVector<Schedule*, 4> schedules;
  for (const auto& unit : units) {
    auto* const schedule = unit->schedule().get();
    if (std::ranges::find(schedules, schedule) == schedules.end()) schedules.push_back(schedule);
  }
  std::ranges::sort(schedules);
  return schedules;
}

}  // namespace

WriteGuard::WriteGuard(std::span<const std::shared_ptr<Unit>> units, WriteKind how, std::string_view writer) : units_(units) {
  const bool is_load = how == WriteKind::Load, is_skip = how == WriteKind::Skip, by_operators = how == WriteKind::Operators;
  for (auto* schedule : schedules_of(units)) {
    locks_.push_back(schedule->exclusive());
    if (by_operators || is_update(how)) expect_averaged(*schedule);
  }
  for (const auto& unit : units) {
    const LockedState state(*unit);
    if (how != WriteKind::Unsharded) unit->schedule()->expect_writable(*unit);
    if (how != WriteKind::Unsharded && !is_load) state->reduction.expect_synced();
    if (!is_load && !is_skip) state->expect_own_values();
  }
  // An optimizer of torch::optim writes only parameters with gradients, so it may leave out units whose gradients wait for a reduction.
  for (auto* schedule : schedules_of(units)) {
    if (by_operators) schedule->expect_synced();
  }
  for (const auto& unit : units) unit->schedule()->done_reading(*unit);
  for (const auto& unit : units) {
    const LockedState state(*unit);
    auto& versions = state->versions;
    if (is_load) state->is_swapped = false;
    versions.set_writer(how, writer);
    is_skip ? versions.skip() : versions.wait_to_write(how);
    // commit() publishes an update at once, unless other ranks may still read the previous version.
    if (!is_update(how) || versions.publishes_later()) unit->schedule()->note_written(*unit);
  }
  if (is_load) outdate_all();
}

void WriteGuard::outdate(const at::Tensor& shard) const {
  if (const auto unit = unit_of(shard)) unit->outdate(shard);
}

void WriteGuard::outdate_all() const {
  for (const auto& unit : units_) unit->outdate({});
}

at::Tensor WriteGuard::cast_copy(const at::Tensor& flat) const {
  const auto unit = unit_of(flat);
  return unit ? LockedState(*unit)->versions.cast_copy(flat) : at::Tensor();
}

void WriteGuard::commit() const {
  for (const auto& unit : units_) {
    const LockedState state(*unit);
    if (!state->versions.publishes_later()) unit->schedule()->flush(*unit);
  }
}

void expect_writable(std::span<const std::shared_ptr<Unit>> units) {
  for (const auto& unit : units) unit->schedule()->expect_writable(*unit);
}

void set_swapped(std::span<const std::shared_ptr<Unit>> units, bool swapped) {
  for (const auto& unit : units) LockedState(*unit)->is_swapped = swapped;
}

bool are_swapped(std::span<const std::shared_ptr<Unit>> units) {
  return std::ranges::all_of(units, [](const auto& unit) { return LockedState(*unit)->is_swapped; });
}

void hand_out_pointer(const std::shared_ptr<Unit>& unit) {
  const WriteGuard guard(std::span(&unit, 1), WriteKind::Operators);
  guard.outdate_all();
  LockedState(*unit)->versions.hand_out_pointer();
}

}  // namespace tessera
