// The part of Schedule that unshards and reshards units, within the bound on how many are unsharded at once.
#include <algorithm>
#include <exception>
#include <iterator>

#include "tessera/comm/record.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"

namespace tessera {

/// Runs a change of the unit's state and counts the memory that it takes or frees.
template <class Change>
void Schedule::change(const Unit& unit, const Change& change) {
  auto& state = state_of(unit);
  const auto before = state.held_bytes();
  const auto count = [&] {
    const auto now = state.held_bytes();
    live_counters_.live_bytes += now - before;
    settings_.world.record()->add_unsharded(static_cast<int64_t>(now - before));
  };
  try {
    change(state);
  } catch (...) {
    count();
    throw;
  }
  count();
  live_counters_.peak_bytes = std::max(live_counters_.peak_bytes, live_counters_.live_bytes);
}

void Schedule::unshard(Unit& unit, std::span<at::Tensor> operands) {
  std::erase(live_, &unit);
  std::erase(partly_, &unit);
  change(unit, [&](UnitState& state) { state.unshard(operands); });
  live_.push_back(&unit);
}

void Schedule::reshard(Unit& unit) {
  const auto held = lock();
  change(unit, [](UnitState& state) { state.reshard(); });
  std::erase(live_, &unit);
  std::erase(partly_, &unit);
}

void Schedule::make_room(std::span<Unit* const> wanted) {
  idle_.clear();
  std::ranges::copy_if(live_, std::back_inserter(idle_), [&](Unit* unit) {
    return !unit->flags().is_pinned() && std::ranges::find(wanted, unit) == wanted.end() && !stays(*unit);
  });
  const auto to_come = order().to_come();
  const auto next_use = [&](Unit* unit) { return std::ranges::find(to_come, unit) - to_come.begin(); };
  const auto reshard_idle = [&](Unit* unit) {
    if (pass_ != Pass::Training) return reshard(*unit);
    change(*unit, [](UnitState& state) { state.reshard_after_forward(); });
    std::erase(live_, unit);
    if (state_of(*unit).is_partly_resharded()) partly_.push_back(unit);
  };
  // While a pass follows the prediction, each unit is resharded after its last use in the pass. One unit beyond the bound may stay for a
  // later use.
  if (order().is_predicted()) {
    const auto is_over = [&](Unit* unit) { return next_use(unit) == std::ssize(to_come); };
    for (auto* unit : idle_) {
      if (is_over(unit)) reshard_idle(unit);
    }
    std::erase_if(idle_, is_over);
  }
  // Reshards further units until the bound holds. The first is the unit whose next use is farthest away or, without a prediction, whose
  // last use is longest ago.
  const auto to_unshard = std::ranges::count_if(wanted, [](Unit* unit) { return !state_of(*unit).has_memory(); }) +
                          (settings_.limit_all_gathers && prefetches_on_use() ? std::ssize(predicted()) : 0);
  while (!idle_.empty() && bounded() + to_unshard > most()) {
    const auto last = std::ranges::max_element(idle_, {}, next_use);
    reshard_idle(*last);
    idle_.erase(last);
  }
}

bool Schedule::stays(const Unit& unit) const {
  // With UnusedParameters::Zeros, backward may need different units on different ranks, but an all-gather needs all ranks.
  if (reduces_in_order() && pass_ != Pass::Evaluation) return true;
  const auto& state = state_of(unit);
  if (state.waits_for_use() || (pass_ == Pass::Backward && !state.settings.reshard_after_backward)) return true;
  if (!state.stays_after_forward()) return false;
  if (pass_ != Pass::Backward || !order().is_predicted()) return true;
  const auto to_come = order().to_come();
  return std::ranges::find(to_come, &unit) != to_come.end();
}

int64_t Schedule::bounded() const {
  return std::ranges::count_if(live_, [&](Unit* unit) { return !stays(*unit); });
}

bool Schedule::prefetches_on_use() const {
  return pass_ == Pass::Backward ? settings_.backward_prefetch == BackwardPrefetch::Pre : settings_.forward_prefetch;
}

Schedule::Units Schedule::predicted() const {
  Units units;
  if (settings_.limit_all_gathers && settings_.max_live_units < 2) return units;
  const auto to_come = order().to_come();
  const auto ahead = static_cast<size_t>(settings_.prefetch_depth.value_or(world().traits().traces ? 0 : 1));
  for (auto* unit : to_come.first(std::min(to_come.size(), ahead))) {
    if (!state_of(*unit).has_memory() && std::ranges::find(units, unit) == units.end()) units.push_back(unit);
  }
  return units;
}

void Schedule::prefetch_after_use(Unit& unit, std::span<at::Tensor> operands) {
  const auto& settings = state_of(unit).settings;
  const auto& list = pass_ == Pass::Backward ? settings.backward_prefetch : settings.forward_prefetch;
  Units units;
  if (list.empty() && prefetches_on_use()) units = predicted();
  for (const auto& weak : list) {
    const auto next = weak.lock();
    if (next && next->schedule().get() == this && !state_of(*next).has_memory()) units.push_back(next.get());
  }
  prefetch(units, operands);
}

void Schedule::prefetch(std::span<Unit* const> units, std::span<at::Tensor> operands) {
  for (auto* unit : units) {
    if (settings_.limit_all_gathers && bounded() >= most()) return;
    try {
      unshard(*unit, operands);
      state_of(*unit).note_early(UnitState::Early::Prefetched);
    } catch (const std::exception&) {
      // The unit is not needed yet. The first use of it tries again and gets the error.
    }
  }
}

void Schedule::reshard_where(c10::function_ref<bool(Unit&)> chosen) {
  // Backwards, because reshard() removes units from the lists.
  for (auto* list : {&live_, &partly_}) {
    for (size_t i = list->size(); i-- > 0;) {
      auto& unit = *(*list)[i];
      if (!unit.flags().is_pinned() && chosen(unit)) reshard(unit);
    }
  }
}

}  // namespace tessera
