#include "tessera/shard/schedule/live_set.h"

#include <algorithm>
#include <exception>
#include <iterator>

#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

/// Runs a change of the unit's state and counts the memory that it takes or frees.
template <class Change>
void LiveSet::change(const ScheduleLock& held, Unit& unit, const Change& change) {
  auto& state = unit.state(held);
  counters_.live_bytes -= state.held_bytes();
  const auto count = [&] { counters_.live_bytes += state.held_bytes(); };
  try {
    change(state);
  } catch (...) {
    count();
    throw;
  }
  count();
  counters_.peak_bytes = std::max(counters_.peak_bytes, counters_.live_bytes);
}

void LiveSet::add(const ScheduleLock& held, Unit& unit, const Fault& fault) {
  std::erase(live_, &unit);
  std::erase(partly_, &unit);
  change(held, unit, [&](UnitState& state) { state.unshard(fault); });
  live_.push_back(&unit);
}

void LiveSet::remove(const ScheduleLock& held, Unit& unit) {
  change(held, unit, [](UnitState& state) { state.reshard(); });
  std::erase(live_, &unit);
  std::erase(partly_, &unit);
}

void LiveSet::make_room(const ScheduleLock& held, std::span<Unit* const> wanted, const UseOrder& order) {
  idle_.clear();
  std::ranges::copy_if(live_, std::back_inserter(idle_), [&](Unit* unit) {
    return !unit->flags().is_pinned() && std::ranges::find(wanted, unit) == wanted.end() && !stays(held, *unit, order);
  });
  const auto to_come = order.to_come();
  const auto next_use = [&](Unit* unit) { return std::ranges::find(to_come, unit) - to_come.begin(); };
  const auto reshard_idle = [&](Unit* unit) {
    if (order.pass() != Pass::Training) return remove(held, *unit);
    change(held, *unit, [](UnitState& state) { state.reshard_after_forward(); });
    std::erase(live_, unit);
    if (unit->state(held).is_partly_resharded()) partly_.push_back(unit);
  };
  // While a pass follows the prediction, each unit is resharded after its last use in the pass. One unit beyond the bound may stay for a
  // later use.
  if (order.is_predicted()) {
    const auto is_over = [&](Unit* unit) { return next_use(unit) == std::ssize(to_come); };
    for (auto* unit : idle_) {
      if (is_over(unit)) reshard_idle(unit);
    }
    std::erase_if(idle_, is_over);
  }
  // The bound holds for the rest. The first to be resharded is the unit whose next use is farthest away or, without a prediction, whose
  // last use is longest ago.
  const auto to_unshard = std::ranges::count_if(wanted, [&](Unit* unit) { return !unit->state(held).has_memory(); }) +
                          (settings_.limit_all_gathers && prefetches_on_use(order) ? std::ssize(predicted(held, order)) : 0);
  while (!idle_.empty() && bounded(held, order) + to_unshard > most(order)) {
    const auto last = std::ranges::max_element(idle_, {}, next_use);
    reshard_idle(*last);
    idle_.erase(last);
  }
}

bool LiveSet::stays(const ScheduleLock& held, Unit& unit, const UseOrder& order) const {
  // Backward may then need different units on different ranks, and an all-gather needs all ranks.
  if (settings_.unused_parameters == UnusedParameters::Zeros && order.pass() != Pass::Evaluation) return true;
  auto& state = unit.state(held);
  if (state.waits_for_use() || (order.pass() == Pass::Backward && !state.settings.reshard_after_backward)) return true;
  if (!state.stays_after_forward()) return false;
  if (order.pass() != Pass::Backward || !order.is_predicted()) return true;
  const auto to_come = order.to_come();
  return std::ranges::find(to_come, &unit) != to_come.end();
}

int64_t LiveSet::bounded(const ScheduleLock& held, const UseOrder& order) const {
  return std::ranges::count_if(live_, [&](Unit* unit) { return !stays(held, *unit, order); });
}

int64_t LiveSet::most(const UseOrder& order) const {
  return settings_.max_live_units + (order.is_predicted() ? 1 : 0);
}

bool LiveSet::prefetches_on_use(const UseOrder& order) const {
  return order.pass() == Pass::Backward ? settings_.backward_prefetch == BackwardPrefetch::Pre : settings_.forward_prefetch;
}

LiveSet::Units LiveSet::predicted(const ScheduleLock& held, const UseOrder& order) const {
  Units units;
  if (settings_.limit_all_gathers && settings_.max_live_units < 2) return units;
  const auto to_come = order.to_come();
  for (auto* unit : to_come.first(std::min(to_come.size(), static_cast<size_t>(settings_.units_ahead())))) {
    if (!unit->state(held).has_memory() && std::ranges::find(units, unit) == units.end()) units.push_back(unit);
  }
  return units;
}

void LiveSet::prefetch(const ScheduleLock& held, Unit& unit, const Fault& fault, const UseOrder& order) {
  const auto& settings = unit.state(held).settings;
  const auto& list = order.pass() == Pass::Backward ? settings.backward_prefetch : settings.forward_prefetch;
  Units units;
  if (list.empty() && prefetches_on_use(order)) units = predicted(held, order);
  for (const auto& weak : list) {
    const auto next = weak.lock();
    if (next && next->schedule() == unit.schedule() && !next->state(held).has_memory()) units.push_back(next.get());
  }
  start(held, units, fault, order);
}

void LiveSet::prefetch_after(const ScheduleLock& held, Unit& unit, const UseOrder& order) {
  if (settings_.backward_prefetch != BackwardPrefetch::Post || !unit.state(held).settings.backward_prefetch.empty()) return;
  // In a trace there is no operator yet to tie it to. The first operator of the next unit will do, which also comes after this reshard.
  if (unit.mesh().shard().traits().traces) return;
  start(held, predicted(held, order), {}, order);
}

void LiveSet::start(const ScheduleLock& held, std::span<Unit* const> units, const Fault& fault, const UseOrder& order) {
  for (auto* unit : units) {
    if (settings_.limit_all_gathers && bounded(held, order) >= most(order)) return;
    try {
      add(held, *unit, fault);
      unit->state(held).note_early(UnitState::Early::Prefetched);
    } catch (const std::exception&) {
      // The unit is not needed yet. The use that does need it tries again and gets the error.
    }
  }
}

void LiveSet::remove_where(const ScheduleLock& held, c10::function_ref<bool(Unit&)> chosen) {
  // Backwards, because remove() removes units from the lists.
  for (auto* list : {&live_, &partly_}) {
    for (size_t i = list->size(); i-- > 0;) {
      auto& unit = *(*list)[i];
      if (!unit.flags().is_pinned() && chosen(unit)) remove(held, unit);
    }
  }
}

void LiveSet::remove_all(const ScheduleLock& held) {
  remove_where(held, [](Unit&) { return true; });
}

void LiveSet::end_backward(const ScheduleLock& held) {
  remove_where(held, [&](Unit& unit) {
    auto& state = unit.state(held);
    if (!state.settings.reshard_after_backward) state.keep_for_next_use();
    return state.settings.reshard_after_backward;
  });
}

void LiveSet::forget(const Unit& unit, uint64_t held_bytes) {
  if (std::erase(live_, &unit) + std::erase(partly_, &unit) > 0) counters_.live_bytes -= held_bytes;
}

}  // namespace tessera
