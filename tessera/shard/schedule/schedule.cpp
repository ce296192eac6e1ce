#include "tessera/shard/schedule/schedule.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>
#include <ranges>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/tied.h"
#include "tessera/shard/dispatch/watcher.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/parameter_meta.h"

namespace tessera {
namespace {

constexpr std::string_view kPassNames[] = {"no pass", "forward", "a forward without gradients", "backward"};

/// Ends a backward pass of a schedule, once. The autograd engine owns it through its callback: it calls now() when the pass is complete, or
/// destroys the callback when it gives the pass up.
class EndOfBackward {
 public:
  EndOfBackward(std::weak_ptr<Schedule> schedule, uint64_t number) : schedule_(std::move(schedule)), number_(number) {}
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;
  ~EndOfBackward() {
    try {
      now(/*complete=*/false);
    } catch (const std::exception&) {
      // A destructor can't throw. The pass has already failed with an error of its own.
    }
  }

  void now(bool complete) {
    if (const auto schedule = std::exchange(schedule_, {}).lock()) schedule->end_backward(number_, complete);
  }

 private:
  std::weak_ptr<Schedule> schedule_;
  const uint64_t number_;
};

}  // namespace

Pass Schedule::pass_now() const {
  if (torch::autograd::get_current_graph_task_id() != -1) return Pass::Backward;
  // Gradients may be disabled in the middle of a training pass: an autograd::Function runs its forward function that way.
  return c10::GradMode::is_enabled() || pass_ == Pass::Training ? Pass::Training : Pass::Evaluation;
}

void Schedule::enter(Pass pass) {
  if (pass == pass_) return;
  pass_number_++;
  reduced_.clear();
  order(pass_).end();
  order(pass).begin();
  pass_ = pass;
  if (pass == Pass::Evaluation) watch_->evaluations++;
  if (pass == Pass::Backward) {
    to_reduce_.clear();
    ready_.clear();
    // Units without a UnitNode in this pass (frozen units, gradients of inputs only) are resharded at its end. After an exception the
    // engine destroys its callbacks without calling them, hence the destructor of EndOfBackward.
    const auto end = std::make_shared<EndOfBackward>(weak_from_this(), ++backward_);
    torch::autograd::Engine::get_default_engine().queue_callback([end] { end->now(/*complete=*/true); });
  }
}

void Schedule::end_backward(uint64_t number, bool complete) {
  const auto held = lock();
  if (number != backward_) return;
  if (complete && !ready_.empty()) reduce_next(held, /*all=*/true);
  to_reduce_.clear();
  ready_.clear();
  enter(Pass::None);
  settings_.world.enter({});
  live_.end_backward(held);
  finish_reductions();
  watch_->earlier.note_end_of_pass();
  if (complete && settings_.tracing.cuts_after_backward) settings_.world.step_done();
}

void Schedule::visit(const ScheduleLock& held, Unit& unit) {
  if (visited_ != nullptr && visited_ != &unit) visited_->state(held).casts.clear();
  visited_ = &unit;
  unit.mesh().world().enter(kPassNames[static_cast<size_t>(pass_)], unit.name());
  unit.state(held).note_early(UnitState::Early::No);
  unit.state(held).note_use(pass_number_);
  if (!order(pass_).record(&unit)) misses_++;
}

void Schedule::use(std::span<Unit* const> units, const Fault& fault) {
  const auto held = lock();
  enter(pass_now());
  // By far the most frequent case: the unit is unsharded and was the last one used.
  if (units.size() == 1 && units.front() == visited_ && visited_->state(held).is_unsharded() && order(pass_).used_last(visited_)) {
    visited_->state(held).note_stream();
    visited_->flags().pins++;
    return;
  }
  // Units that are kept unsharded (by full_params) need no schedule. Their uses are not recorded, because they may come from several
  // threads in any order.
  if (std::ranges::all_of(units, [](const Unit* unit) { return unit->flags().is_pinned(); })) {
    for (auto* unit : units) {
      unit->state(held).note_stream();
      unit->flags().pins++;
    }
    return;
  }
  const Unwatched unwatched;
  // A rank that reads a unit has finished its step, so all units that it has written are published now; other ranks may be waiting for
  // them.
  while (!written_.empty()) flush(*written_.back());
  // Ranks may use different units where that is allowed, so each makes all of them readable for the others.
  if (reduces_in_order() && settings_.is_model) {
    for (auto* unit : members_) unit->state(held).make_readable();
  }
  for (auto* unit : units) unit->state(held).versions.expect_untouched();
  // An operator that reads a unit between its backward and its step in backward gets the new version.
  const bool steps = reducing_ != nullptr && reducing_->state(held).reduction.writes_shards();
  if (steps && std::ranges::find(units, reducing_) != units.end()) finish_reductions();
  for (auto* unit : units) visit(held, *unit);
  live_.make_room(held, units, order(pass_));
  const auto& tracing = settings_.tracing;
  if (!reduced_.empty()) tie_to_reduced(held, fault);
  const auto behind = (pass_ == Pass::Backward ? tracing.barrier_in_backward : tracing.barrier_in_forward) ? fault : Fault{};
  for (auto* unit : units) live_.add(held, *unit, behind);
  for (auto* unit : units) live_.prefetch(held, *unit, behind, order(pass_));
  wait_and_pin(held, units);
}

/// Without this, a compiler would leave all reductions to the end, and keep the whole gradients of all units until then. One reduction may
/// still run beside the operators of the next unit.
void Schedule::tie_to_reduced(const ScheduleLock& /*held*/, const Fault& fault) {
  if (fault.operands.empty()) return;
  const auto operands = tied({fault.operands.begin(), fault.operands.end()}, std::exchange(reduced_, {}));
  std::ranges::copy(operands, fault.operands.begin());
}

void Schedule::wait_and_pin(const ScheduleLock& held, std::span<Unit* const> units) {
  for (size_t i = 0; i < units.size(); i++) {
    try {
      units[i]->state(held).wait_for_unshard();
    } catch (...) {
      for (auto* failed : units.subspan(i)) {
        if (!failed->flags().is_pinned()) live_.remove(held, *failed);
      }
      release(units.first(i));
      throw;
    }
    units[i]->flags().pins++;
  }
}

void Schedule::release(std::span<Unit* const> units) {
  for (auto* unit : units) unit->flags().pins--;
}

void Schedule::gradients_complete(const ScheduleLock& held, Unit& unit) {
  enter(pass_now());  // registers the callback for the end of the pass, in case no operator of this pass has done so
  if (unit.flags().is_reducing) reducing_ = &unit;
  auto& state = unit.state(held);
  state.note_gradients(pass_number_);
  // A unit that the rest of the pass uses is resharded when another one is needed, unless its shards are about to change.
  const bool is_over = !state.is_used_after_gradients() || state.reduction.writes_shards();
  if (!state.settings.reshard_after_backward) {
    state.keep_for_next_use();
  } else if (is_over && !unit.flags().is_pinned()) {
    live_.remove(held, unit);
  }
  live_.prefetch_after(held, unit, order(pass_));
}

void Schedule::reduce_in_order(Unit& unit, std::function<void(const ScheduleLock&)> reduce) {
  const auto held = lock();
  if (!settings_.is_model) return reduce(held);
  if (ready_.empty()) {
    // Inner units are made first, and backward reaches the units that were made last first. The root's gradients are usually complete last.
    std::ranges::copy_if(members_, std::back_inserter(to_reduce_),
                         [&](Unit* member) { return member->state(held).settings.syncs() && is_trained(*member); });
    std::ranges::sort(to_reduce_, {}, [&](Unit* member) { return std::pair(!member->state(held).is_root, member->number()); });
  }
  const bool comes_again = std::ranges::find(to_reduce_, &unit) == to_reduce_.end();
  ready_[&unit].push_back(std::move(reduce));
  if (comes_again) to_reduce_.push_back(&unit);
  reduce_next(held, /*all=*/false);
}

/// Reduces the units that are next in the order and ready, or all that are left.
void Schedule::reduce_next(const ScheduleLock& held, bool all) {
  const c10::AutoGradMode no_grad(false);
  while (!to_reduce_.empty()) {
    auto& unit = *to_reduce_.back();
    const auto ready = ready_.find(&unit);
    if (ready == ready_.end() && !all) return;
    to_reduce_.pop_back();
    if (ready == ready_.end()) {
      unit.state(held).reduce_unsynced(unit, held);
    } else {
      for (const auto& reduce : std::exchange(ready->second, {})) reduce(held);
    }
  }
}

void Schedule::finish_reductions() {
  const Unwatched unwatched;
  const auto held = lock();
  finish_sum();
  // The unit that was sent last arrives last, so the host waits once.
  while (!arriving_.empty()) {
    auto* const unit = arriving_.back();
    arriving_.pop_back();
    unit->state(held).reduction.finish();
  }
}

void Schedule::finish_sum() {
  const Unwatched unwatched;
  const auto held = lock();
  auto* const unit = std::exchange(reducing_, nullptr);
  if (unit == nullptr) return;
  auto& reduction = unit->state(held).reduction;
  if (pass_ == Pass::Backward && settings_.tracing.barrier_in_backward && settings_.world.traits().traces) reduced_ = reduction.results();
  reduction.finish_sum();
  if (unit->flags().is_reducing) arriving_.push_back(unit);
}

void Schedule::watch(WeakModule module) {
  const auto held = lock();
  sweep_(watched_, [](const WeakModule& known) { return known.expired(); });
  watched_.push_back(std::move(module));
}

std::span<const WeakModule> Schedule::watched_once() {
  const auto held = lock();
  const uint64_t now = pass_number_;
  if (std::exchange(looked_at_, now) == now) return {};
  return watched_;
}

void Schedule::expect_synced() {
  const auto held = lock();
  if (!settings_.is_model) return;
  for (auto* unit : members_) unit->state(held).reduction.expect_synced();
}

void Schedule::expect_writable(const Unit& unit) const {
  if (!unit.flags().is_pinned()) return;
  throw UsageError(
      "a shard of unit '{}' would be written while the unit is in use unsharded (inside tessera::full_params, or by another "
      "thread); the unsharded copy would keep the old values. End that first",
      unit.name());
}

void Schedule::done_reading(Unit& unit) {
  const auto held = lock();
  unit.mesh().world().enter("a write to the shards", unit.name());
  finish_reductions();
  if (!unit.flags().is_pinned()) live_.remove(held, unit);
  unit.state(held).versions.done_reading();
}

void Schedule::note_written(Unit& unit) {
  const auto held = lock();
  if (std::ranges::find(written_, &unit) == written_.end()) written_.push_back(&unit);
}

void Schedule::flush(Unit& unit) {
  const Unwatched unwatched;
  const auto held = lock();
  if (!unit.flags().is_pinned()) unit.state(held).versions.publish();
  std::erase(written_, &unit);
}

void Schedule::abandon_pass() {
  const auto held = lock();
  for (auto& order : orders_) order = UseOrder(order.pass());  // ranks may have recorded different uses
  pass_ = Pass::None;
  watch_->evaluations = 0;
  backward_++;
  to_reduce_.clear();
  ready_.clear();
  visited_ = nullptr;
  if (auto* unit = std::exchange(reducing_, nullptr)) unit->state(held).reduction.abandon();
  for (auto* unit : std::exchange(arriving_, {})) unit->state(held).reduction.abandon();
  reduced_.clear();
  live_.remove_all(held);
}

void Schedule::prefetch(Unit& unit) {
  const Unwatched unwatched;
  const auto held = lock();
  if (!unit.state(held).has_memory()) {
    while (!written_.empty()) flush(*written_.back());
    live_.add(held, unit, {});
  }
  unit.state(held).note_early(UnitState::Early::AskedFor);
}

void Schedule::wait_for(Unit& unit) {
  const Unwatched unwatched;
  const auto held = lock();
  if (!unit.state(held).has_memory()) return;  // it was resharded meanwhile
  Unit* const units[] = {&unit};
  wait_and_pin(held, units);
  release(units);
}

void Schedule::evict(Unit& unit) {
  live_.remove(lock(), unit);
}

void Schedule::reshard_all() {
  if (!reduces_in_order()) live_.remove_all(lock());
}

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
  unit.state(held).reduction.watch(watch_);
  members_.push_back(&unit);
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
  if (unit.flags().is_pinned()) throw UsageError("unit '{}' can't become part of a larger one while it is in use", unit.name());
  auto& state = unit.state(held);
  state.reduction.finish();
  before->live_.remove(held, unit);
  before->forget(unit, 0);
  state.is_root = false;
  join(unit, nullptr);
}

void Schedule::forget(const Unit& unit, uint64_t held_bytes) {
  const auto held = lock();
  live_.forget(unit, held_bytes);
  if (reducing_ == &unit) reducing_ = nullptr;
  std::erase(arriving_, &unit);
  std::erase(written_, &unit);
  std::erase(members_, &unit);
  std::erase(to_reduce_, &unit);
  ready_.erase(&unit);
  for (auto& order : orders_) order = UseOrder(order.pass());
  watch_->forget(unit);
  if (visited_ == &unit) visited_ = nullptr;
}

void Schedule::reset_counters() {
  const auto held = lock();
  live_.reset_counters();
  misses_ = 0;
}

}  // namespace tessera
