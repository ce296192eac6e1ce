#include "tessera/shard/unit/schedule.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/shard/unit/unit_memory.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

constexpr size_t kLongestPass = 1 << 12;  // uses; of longer ones the order is not learnt

/// Ends the backward pass of a schedule, once. The engine keeps it until it is through, or gives up.
class EndOfBackward {
 public:
  EndOfBackward(std::weak_ptr<Schedule> schedule, uint64_t number) : schedule_(std::move(schedule)), number_(number) {}
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;
  ~EndOfBackward() {
    try {
      now();
    } catch (const std::exception&) {
      // The pass has failed already; whoever needs what has failed here hears of it.
    }
  }

  void now() {
    if (const auto schedule = std::exchange(schedule_, {}).lock()) schedule->end_backward(number_);
  }

 private:
  std::weak_ptr<Schedule> schedule_;
  const uint64_t number_;
};

}  // namespace

Schedule::Pass Schedule::pass_now() const {
  if (torch::autograd::get_current_graph_task_id() != -1) return Pass::Backward;
  // An autograd::Function runs its forward without gradients, in the middle of a pass that trains.
  return c10::GradMode::is_enabled() || pass_ == Pass::Training ? Pass::Training : Pass::Evaluation;
}

void Schedule::enter(Pass pass) {
  if (pass == pass_) return;
  pass_number_++;
  // A pass that was complete becomes the record of its kind. Backward passes end by themselves, forward ones by what follows.
  auto& ended = order(pass_);
  if (!ended.current.empty()) std::swap(ended.recorded, ended.current);  // and not a move: both keep their memory
  ended.current.clear();
  auto& begins = order(pass);
  begins.current.clear();
  begins.trusted = !begins.recorded.empty();
  begins.next = 0;
  pass_ = pass;
  if (pass == Pass::Backward) {
    // What no UnitNode frees (frozen units, gradients of inputs only) is freed when the engine is through. Where an exception stops it,
    // it drops its callbacks without a call.
    const auto end = std::make_shared<EndOfBackward>(weak_from_this(), ++backward_);
    torch::autograd::Engine::get_default_engine().queue_callback([end] { end->now(); });
  }
}

void Schedule::end_backward(uint64_t number) {
  const auto held = lock();
  if (number != backward_) return;
  enter(Pass::None);
  free_all();
  finish_reductions();
}

void Schedule::record(Unit& unit) {
  if (visited_ != nullptr && visited_ != &unit) visited_->end_visit();
  visited_ = &unit;
  auto& now = order(pass_);
  if (!now.current.empty() && now.current.back() == &unit) return;
  // A forward pass that begins as the recorded one did, where that one ended, is the next of several (evaluation, accumulation).
  if (now.trusted && now.next == now.recorded.size() && now.recorded.front() == &unit) {
    now.current.clear();
    now.next = 0;
  }
  now.current.push_back(&unit);
  // Of passes in a row whose first unit is their last, too, what repeats begins with the second.
  if (now.trusted && now.next == 0 && now.recorded.front() != &unit && now.recorded.back() == &unit) return;
  if (now.current.size() > kLongestPass) now.current.erase(now.current.begin(), now.current.begin() + kLongestPass / 2);
  if (!now.trusted) {
    // Nothing marks the end of a pass that no backward pass follows.
    if (pass_ == Pass::Evaluation) now.trusted = now.learn_from_repetition();
  } else if (now.next < now.recorded.size() && now.recorded[now.next] == &unit) {
    now.next++;
  } else {
    now.trusted = false;
    counters_.misses++;
  }
}

bool Schedule::Order::learn_from_repetition() {
  const auto all = std::span(current);
  for (size_t length = 1; 2 * length <= all.size(); length++) {
    const auto last = all.last(length);
    if (all[all.size() - 1 - length] != all.back() || !std::ranges::equal(last, all.last(2 * length).first(length))) continue;
    // A repetition inside of a pass leaves out units that were used not long ago.
    const auto lately = all.last(std::min(all.size(), 4 * length));
    const std::set<Unit*> repeated(last.begin(), last.end());
    if (std::ranges::any_of(lately, [&](Unit* unit) { return !repeated.contains(unit); })) continue;
    recorded.assign(last.begin(), last.end());
    next = length;
    return true;
  }
  return false;
}

void Schedule::evict(std::span<Unit* const> wanted) {
  auto& idle = idle_;
  idle.clear();
  std::ranges::copy_if(live_, std::back_inserter(idle),
                       [&](Unit* unit) { return !unit->pinned() && std::ranges::find(wanted, unit) == wanted.end(); });
  const auto& now = order(pass_);
  const auto to_come = now.to_come();
  const auto next_use = [&](Unit* unit) { return std::ranges::find(to_come, unit) - to_come.begin(); };
  // In the middle of a known pass a unit is freed when it has had its last use, and one more may be kept for later: the root, most often,
  // which is used at both ends.
  const bool known = now.trusted && now.next > 1;
  if (known) {
    for (auto* unit : idle) {
      if (next_use(unit) == std::ssize(to_come)) reshard(*unit);
    }
    std::erase_if(idle, [](Unit* unit) { return !unit->holds_memory(); });
  }
  // Apart from that the bound decides: who is needed last, or was used longest ago, goes first.
  const auto most = max_live_units_ + (known ? 1 : 0);
  const auto to_unshard = std::ranges::count_if(wanted, [](const Unit* unit) { return !unit->holds_memory(); }) + (next_to_unshard() != nullptr);
  while (!idle.empty() && std::ssize(live_) + to_unshard > most) {
    const auto last = std::ranges::max_element(idle, {}, next_use);
    reshard(**last);
    idle.erase(last);
  }
}

void Schedule::use(std::span<Unit* const> units, const Fault& fault) {
  const auto held = lock();
  enter(pass_now());
  // By far the most frequent case: one operator after the other of a unit that is whole.
  const auto& uses = order(pass_).current;
  if (units.size() == 1 && units.front() == visited_ && visited_->is_unsharded() && !uses.empty() && uses.back() == visited_) {
    units.front()->pin();
    return;
  }
  // What is kept whole (by full_params) needs no schedule, and its uses, perhaps by several threads in any order, would teach none.
  if (std::ranges::all_of(units, &Unit::pinned)) {
    for (auto* unit : units) unit->pin();
    return;
  }
  // Whoever reads has written all that it will, in this unit and in others, for which other ranks may wait.
  while (!written_.empty()) publish(*written_.back());
  for (auto* unit : units) unit->expect_untouched();
  for (auto* unit : units) record(*unit);
  evict(units);
  for (auto* unit : units) unshard(*unit, fault);
  prefetch();
  for (size_t i = 0; i < units.size(); i++) {
    try {
      units[i]->wait_for_unshard();
    } catch (...) {
      for (size_t failed = i; failed < units.size(); failed++) {
        if (!units[failed]->pinned()) reshard(*units[failed]);
      }
      release(units.first(i));
      throw;
    }
    units[i]->pin();
  }
}

void Schedule::unshard(Unit& unit, const Fault& fault) {
  if (unit.holds_memory()) {
    std::erase(live_, &unit);
  } else {
    unit.unshard(fault);
    counters_.live_bytes += unit.unsharded_bytes();
    counters_.peak_bytes = std::max(counters_.peak_bytes, counters_.live_bytes);
  }
  live_.push_back(&unit);
}

void Schedule::prefetch() {
  auto* next = next_to_unshard();
  if (next == nullptr) return;
  try {
    unshard(*next, {});
  } catch (const std::exception&) {
    // It is not needed yet. Whoever needs it tries again, and hears of it.
  }
}

Unit* Schedule::next_to_unshard() {
  const auto to_come = order(pass_).to_come();
  if (to_come.empty() || max_live_units_ < 2 || to_come.front()->holds_memory()) return nullptr;
  // A tracing engine has no later to bring it in before.
  return to_come.front()->mesh().shard().traits().traces ? nullptr : to_come.front();
}

void Schedule::release(std::span<Unit* const> units) {
  for (auto* unit : units) unit->unpin();
}

void Schedule::reduces(Unit& unit) {
  enter(pass_now());  // so that the end of the pass is heard of
  reducing_ = &unit;
  if (!unit.pinned()) reshard(unit);
}

void Schedule::finish_reductions() {
  const auto held = lock();
  if (auto* unit = std::exchange(reducing_, nullptr)) unit->finish_reduction();
}

void Schedule::done_reading(Unit& unit) {
  const auto held = lock();
  expect_writable(unit);
  finish_reductions();
  reshard(unit);
  unit.done_reading();
}

void Schedule::expect_writable(const Unit& unit) const {
  if (!unit.pinned()) return;
  throw UsageError(
      fmt::format("a shard of unit '{}' would be written while the unit is in use as a whole (inside tessera::full_params, or by another "
                  "thread); what is whole would be stale. End that first",
                  unit.name()));
}

void Schedule::about_to_write(Unit& unit) {
  const auto held = lock();
  expect_writable(unit);
  reshard(unit);
  unit.about_to_write();
  expect_to_publish(unit);
}

void Schedule::expect_to_publish(Unit& unit) {
  if (std::ranges::find(written_, &unit) == written_.end()) written_.push_back(&unit);
}

void Schedule::about_to_update(Unit& unit) {
  const auto held = lock();
  expect_writable(unit);
  reshard(unit);
  unit.about_to_update();
  if (unit.late()) expect_to_publish(unit);
}

void Schedule::skip_update(Unit& unit) {
  const auto held = lock();
  done_reading(unit);
  unit.skip_update();
  expect_to_publish(unit);
}

void Schedule::hand_out_pointer(Unit& unit) {
  const auto held = lock();
  about_to_write(unit);
  unit.outdate({});
  unit.hand_out_pointer();
}

void Schedule::publish_early(Unit& unit) {
  const auto held = lock();
  if (!unit.late()) publish(unit);
}

void Schedule::publish(Unit& unit) {
  if (!unit.pinned()) unit.publish();
  std::erase(written_, &unit);
}

void Schedule::abandon_pass() {
  const auto held = lock();
  for (auto& order : orders_) order = {};  // ranks came to different places
  pass_ = Pass::None;
  backward_++;
  visited_ = nullptr;
  if (auto* unit = std::exchange(reducing_, nullptr)) unit->abandon_reduction();
  free_all();
}

void Schedule::free_all() {
  const auto held = lock();
  // reshard takes them out of the list.
  for (size_t i = live_.size(); i-- > 0;) {
    if (!live_[i]->pinned()) reshard(*live_[i]);
  }
}

void Schedule::hand_over(Unit& unit) {
  const auto held = lock();
  if (unit.pinned()) throw UsageError(fmt::format("unit '{}' can't become part of a larger one while it is in use", unit.name()));
  unit.finish_reduction();
  reshard(unit);
  forget(unit);
}

void Schedule::forget(const Unit& unit) {
  const auto held = lock();
  if (std::erase(live_, &unit) > 0) counters_.live_bytes -= unit.unsharded_bytes();
  if (reducing_ == &unit) reducing_ = nullptr;
  std::erase(written_, &unit);
  for (auto& order : orders_) order = {};
  if (visited_ == &unit) visited_ = nullptr;
}

void Schedule::reshard(Unit& unit) {
  if (!unit.holds_memory()) return;
  counters_.live_bytes -= unit.unsharded_bytes();
  unit.reshard();
  std::erase(live_, &unit);
}

void Schedule::reset_counters() {
  const auto held = lock();
  counters_.peak_bytes = counters_.live_bytes;
  counters_.misses = 0;
}

}  // namespace tessera
