#include "tessera/shard/unit/live_set.h"

#include <algorithm>
#include <exception>
#include <iterator>

#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/unit_state.h"
#include "tessera/shard/unit/use_order.h"

namespace tessera {

void LiveSet::unshard(const ScheduleLock& held, Unit& unit, const Fault& fault) {
  auto& state = unit.state(held);
  if (state.has_memory()) {
    std::erase(live_, &unit);
  } else {
    state.unshard(fault);
    counters_.live_bytes += unit.unsharded_bytes();
    counters_.peak_bytes = std::max(counters_.peak_bytes, counters_.live_bytes);
  }
  live_.push_back(&unit);
}

void LiveSet::reshard(const ScheduleLock& held, Unit& unit) {
  auto& state = unit.state(held);
  if (!state.has_memory()) return;
  counters_.live_bytes -= unit.unsharded_bytes();
  state.reshard();
  std::erase(live_, &unit);
}

void LiveSet::evict(const ScheduleLock& held, std::span<Unit* const> wanted, const UseOrder& order) {
  const auto has_memory = [&](Unit* unit) { return unit->state(held).has_memory(); };
  idle_.clear();
  std::ranges::copy_if(live_, std::back_inserter(idle_),
                       [&](Unit* unit) { return !unit->pinned() && std::ranges::find(wanted, unit) == wanted.end(); });
  const auto to_come = order.to_come();
  const auto next_use = [&](Unit* unit) { return std::ranges::find(to_come, unit) - to_come.begin(); };
  // While a pass follows the prediction, each unit is resharded after its last use in the pass. One unit beyond the bound may stay for a
  // later use; most often it is the root, which is used at both ends of a pass.
  if (order.is_predicted()) {
    for (auto* unit : idle_) {
      if (next_use(unit) == std::ssize(to_come)) reshard(held, *unit);
    }
    std::erase_if(idle_, [&](Unit* unit) { return !has_memory(unit); });
  }
  // The bound holds for what is left. First the unit goes whose next use is farthest away or, without a prediction, whose last use is
  // longest ago.
  const auto most = max_live_units_ + (order.is_predicted() ? 1 : 0);
  const auto to_unshard =
      std::ranges::count_if(wanted, [&](Unit* unit) { return !has_memory(unit); }) + (next_to_unshard(held, order) != nullptr);
  while (!idle_.empty() && std::ssize(live_) + to_unshard > most) {
    const auto last = std::ranges::max_element(idle_, {}, next_use);
    reshard(held, **last);
    idle_.erase(last);
  }
}

void LiveSet::prefetch(const ScheduleLock& held, const UseOrder& order) {
  auto* next = next_to_unshard(held, order);
  if (next == nullptr) return;
  try {
    unshard(held, *next, {});
  } catch (const std::exception&) {
    // The unit is not needed yet. The use that does need it tries again and gets the error.
  }
}

Unit* LiveSet::next_to_unshard(const ScheduleLock& held, const UseOrder& order) const {
  const auto to_come = order.to_come();
  if (to_come.empty() || max_live_units_ < 2 || to_come.front()->state(held).has_memory()) return nullptr;
  // With a transport that traces, operations are only recorded, so a prefetch would overlap with nothing.
  return to_come.front()->mesh().shard().traits().traces ? nullptr : to_come.front();
}

void LiveSet::reshard_all(const ScheduleLock& held) {
  // Backwards, because reshard() removes units from the list.
  for (size_t i = live_.size(); i-- > 0;) {
    if (!live_[i]->pinned()) reshard(held, *live_[i]);
  }
}

void LiveSet::forget(const Unit& unit) {
  if (std::erase(live_, &unit) > 0) counters_.live_bytes -= unit.unsharded_bytes();
}

}  // namespace tessera
