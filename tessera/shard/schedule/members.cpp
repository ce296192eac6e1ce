// The part of Schedule that knows the units of a model: they join, leave, and are counted for records.
#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/record.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/figures.h"

namespace tessera {

void Schedule::add(Unit& unit) {
  const auto end = [&unit](UnitState* state) {
    unit.schedule()->forget(unit, state->held_bytes());
    delete state;
  };
  join(unit, {new UnitState(unit), end});
}

void Schedule::join(Unit& unit, std::shared_ptr<UnitState> state) {
  const auto held = lock();
  unit.attach(shared_from_this(), std::move(state));
  state_of(unit).reduction.watch(watch_);
  members_.push_back(&unit);
  figures_.reset();
  if (std::exchange(is_recorded_, true)) return;
  settings_.world.record()->add_model([weak = weak_from_this()](ModelFigures& figures) {
    const auto schedule = weak.lock();
    if (schedule) schedule->count(figures);
    return schedule != nullptr;
  });
}

std::vector<UnitFigures> Schedule::figures_of_members() const {
  std::vector<UnitFigures> all;
  const bool has_root = std::ranges::any_of(members_, [](Unit* unit) { return state_of(*unit).is_root; });
  for (auto* unit : members_) {
    auto& own = all.emplace_back(figures_of(*unit));
    own.depth = std::ranges::count_if(members_, [&](Unit* other) { return unit->name().starts_with(other->name() + "."); });
    if (has_root && !state_of(*unit).is_root) own.depth++;
  }
  return all;
}

/// Called in the program's thread, many times a second.
void Schedule::count(ModelFigures& figures) {
  const auto held = lock();
  auto& [models, memory, sums] = figures;
  if (!figures_) figures_ = std::make_shared<const std::vector<UnitFigures>>(figures_of_members());
  models.push_back(figures_);
  sums["misses"] += misses_;
  memory["unsharded"] += live_counters_.peak_bytes;
  for (auto* unit : members_) {
    const auto& counters = unit->counters();
    sums["gathers"] += counters.gathers;
    sums["reductions"] += counters.reductions;
    sums["gathered_bytes"] += counters.gathered_bytes;
    sums["cancelled"] += counters.cancelled;
    for (const auto& group : unit->groups()) {
      memory["shards"] += group.own.nbytes();
      for (const auto& parameter : group.listed()) {
        if (const auto& gradient = parameter.shard.grad(); gradient.defined()) memory["gradients"] += gradient.nbytes();
      }
    }
  }
}

const Unit* Schedule::member_outside(std::span<const std::shared_ptr<Unit>> units) const {
  if (!settings_.is_model) return nullptr;
  const auto is_outside = [&](const Unit* member) {
    return std::ranges::none_of(units, [&](const auto& unit) { return unit.get() == member; });
  };
  const auto found = std::ranges::find_if(members_, is_outside);
  return found == members_.end() ? nullptr : *found;
}

void Schedule::take_over(Unit& unit) {
  const auto before = unit.schedule();
  if (before.get() == this) return;
  const auto held = before->lock();
  if (unit.flags().is_pinned()) {
    throw UsageError(
        "unit '{}' can't become part of a larger model while it is in use unsharded (inside tessera::full_params, or by another "
        "thread); call fully_shard for the outer module after that use has ended",
        unit.name());
  }
  auto& state = state_of(unit);
  state.reduction.finish();
  before->reshard(unit);
  before->forget(unit, 0);
  state.is_root = false;
  join(unit, nullptr);
}

void Schedule::forget(const Unit& unit, uint64_t held_bytes) {
  const auto held = lock();
  if (std::erase(live_, &unit) + std::erase(partly_, &unit) > 0) {
    live_counters_.live_bytes -= held_bytes;
    settings_.world.record()->add_unsharded(-static_cast<int64_t>(held_bytes));
  }
  if (reducing_ == &unit) reducing_ = nullptr;
  std::erase(arriving_, &unit);
  std::erase(written_, &unit);
  std::erase(members_, &unit);
  figures_.reset();
  std::erase(to_reduce_, &unit);
  ready_.erase(&unit);
  for (auto& order : orders_) order = UseOrder(order.pass());
  watch_->forget(unit);
  if (visited_ == &unit) visited_ = nullptr;
}

}  // namespace tessera
