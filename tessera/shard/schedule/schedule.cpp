#include "tessera/shard/schedule/schedule.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <ranges>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/tied.h"
#include "tessera/comm/record.h"
#include "tessera/shard/dispatch/watcher.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/figures.h"
#include "tessera/shard/unit/parameter_meta.h"

namespace tessera {
namespace {

constexpr std::string_view kPassNames[] = {"no pass", "forward", "a forward without gradients", "backward"};

/// Ends a backward pass of a schedule, once. A callback of the autograd engine owns it: the engine calls now() when the pass is complete,
/// or destroys the callback when it gives the pass up.
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
    // Units without a UnitNode in this pass (frozen units, gradients of inputs only) are resharded at the end of the pass. After an
    // exception the engine destroys its callbacks without calling them, hence the destructor of EndOfBackward.
    const auto end = std::make_shared<EndOfBackward>(weak_from_this(), ++backward_);
    torch::autograd::Engine::get_default_engine().queue_callback([end] { end->now(/*complete=*/true); });
  }
}

void Schedule::end_backward(uint64_t number, bool complete) {
  const auto held = lock();
  if (number != backward_) return;
  if (complete && !ready_.empty()) reduce_next(/*all=*/true);
  to_reduce_.clear();
  ready_.clear();
  enter(Pass::None);
  settings_.world.enter({});
  // Units with reshard_after_backward = false stay unsharded.
  reshard_where([](Unit& unit) {
    auto& state = state_of(unit);
    if (!state.settings.reshard_after_backward) state.keep_for_next_use();
    return state.settings.reshard_after_backward;
  });
  finish_reductions();
  watch_->earlier.note_end_of_pass();
  if (complete && settings_.tracing.cuts_after_backward) settings_.world.step_done();
  if (complete) settings_.world.record()->end_backward(this);
}

void Schedule::visit(Unit& unit) {
  if (visited_ != nullptr && visited_ != &unit) state_of(*visited_).casts.clear();
  visited_ = &unit;
  unit.mesh().world().enter(kPassNames[static_cast<size_t>(pass_)], unit.name());
  state_of(unit).note_early(UnitState::Early::No);
  state_of(unit).note_use(pass_number_);
  if (!order(pass_).record(&unit)) misses_++;
}

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

void Schedule::use(std::span<Unit* const> units, std::span<at::Tensor> operands) {
  const auto held = lock();
  enter(pass_now());
  // Returns early in by far the most frequent case: the unit is unsharded, and is the unit that was used last.
  if (units.size() == 1 && units.front() == visited_ && state_of(*visited_).is_unsharded() && order(pass_).used_last(visited_)) {
    state_of(*visited_).note_stream();
    visited_->flags().pins++;
    return;
  }
  // Units that are kept unsharded (by full_params) need no schedule. Their uses are not recorded, because they may come from several
  // threads in any order.
  if (std::ranges::all_of(units, [](const Unit* unit) { return unit->flags().is_pinned(); })) {
    for (auto* unit : units) {
      state_of(*unit).note_stream();
      unit->flags().pins++;
    }
    return;
  }
  const Unwatched unwatched;
  // A rank that reads a unit has finished its step, so all units that it has written are published now; other ranks may be waiting for
  // them.
  while (!written_.empty()) flush(*written_.back());
  // With UnusedParameters::Zeros, ranks may use different units, so each rank makes its shards of all units readable for the others.
  if (reduces_in_order() && settings_.is_model) {
    for (auto* unit : members_) state_of(*unit).make_readable();
  }
  for (auto* unit : units) state_of(*unit).versions.expect_untouched();
  // If the optimizer's step in backward is about to write a unit that the operator reads, that step comes first, and the operator gets the
  // new version.
  const bool steps = reducing_ != nullptr && state_of(*reducing_).reduction.writes_shards();
  if (steps && std::ranges::find(units, reducing_) != units.end()) finish_reductions();
  for (auto* unit : units) visit(*unit);
  make_room(units);
  const auto& tracing = settings_.tracing;
  if (!reduced_.empty()) tie_to_reduced(operands);
  const auto behind =
      (pass_ == Pass::Backward ? tracing.barrier_in_backward : tracing.barrier_in_forward) ? operands : std::span<at::Tensor>();
  for (auto* unit : units) unshard(*unit, behind);
  for (auto* unit : units) prefetch_after_use(*unit, behind);
  wait_and_pin(units);
}

/// Makes the operator with these operands depend on the results of the last reduction. Without this dependency, a compiler would leave all
/// reductions to the end, and keep the whole gradients of all units until then. One reduction may still overlap with the operators of the
/// next unit.
void Schedule::tie_to_reduced(std::span<at::Tensor> operands) {
  if (!operands.empty()) std::ranges::copy(tied({operands.begin(), operands.end()}, std::exchange(reduced_, {})), operands.begin());
}

void Schedule::wait_and_pin(std::span<Unit* const> units) {
  for (size_t i = 0; i < units.size(); i++) {
    try {
      state_of(*units[i]).wait_for_unshard();
    } catch (...) {
      for (auto* failed : units.subspan(i)) {
        if (!failed->flags().is_pinned()) reshard(*failed);
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

void Schedule::gradients_complete(Unit& unit) {
  const auto held = lock();
  enter(pass_now());  // registers the callback for the end of the pass, in case no operator of this pass has done so
  if (unit.flags().is_reducing) reducing_ = &unit;
  auto& state = state_of(unit);
  state.note_gradients(pass_number_);
  // A unit that the rest of the pass uses is resharded only when make_room() needs its memory for another unit. But if a step in backward
  // is about to change its shards, it is resharded now.
  const bool is_over = !state.is_used_after_gradients() || state.reduction.writes_shards();
  if (!state.settings.reshard_after_backward) {
    state.keep_for_next_use();
  } else if (is_over && !unit.flags().is_pinned()) {
    reshard(unit);
  }
  if (settings_.backward_prefetch != BackwardPrefetch::Post || !state.settings.backward_prefetch.empty()) return;
  // In a trace there is no operator here to which a prefetch could be tied. Instead, the first operator of the next unit unshards that
  // unit, which is also after this unit has been resharded.
  if (!unit.mesh().shard().traits().traces) prefetch(predicted(), {});
}

void Schedule::reduce_in_order(Unit& unit, std::function<void()> reduce) {
  const auto held = lock();
  if (!settings_.is_model) return reduce();
  if (ready_.empty()) {
    // The next unit to reduce is at the end of the list. Backward first reaches the units that were made last. The root is an exception: it
    // is made last of all, but its gradients are usually complete last.
    std::ranges::copy_if(members_, std::back_inserter(to_reduce_),
                         [&](Unit* member) { return state_of(*member).settings.syncs() && is_trained(*member); });
    std::ranges::sort(to_reduce_, {}, [&](Unit* member) { return std::pair(!state_of(*member).is_root, member->number()); });
  }
  const bool comes_again = std::ranges::find(to_reduce_, &unit) == to_reduce_.end();
  ready_[&unit].push_back(std::move(reduce));
  if (comes_again) to_reduce_.push_back(&unit);
  reduce_next(/*all=*/false);
}

/// Reduces the units that are next in the order and ready, or all that are left.
void Schedule::reduce_next(bool all) {
  const c10::AutoGradMode no_grad(false);
  while (!to_reduce_.empty()) {
    auto& unit = *to_reduce_.back();
    const auto ready = ready_.find(&unit);
    if (ready == ready_.end() && !all) return;
    to_reduce_.pop_back();
    if (ready == ready_.end()) {
      state_of(unit).reduce_unsynced(unit);
    } else {
      for (const auto& reduce : std::exchange(ready->second, {})) reduce();
    }
  }
}

void Schedule::finish_reductions() {
  const Unwatched unwatched;
  const auto held = lock();
  finish_sum();
  // The gradients that were copied last arrive last, so the host waits only once.
  while (!arriving_.empty()) {
    auto* const unit = arriving_.back();
    arriving_.pop_back();
    state_of(*unit).reduction.finish();
  }
}

void Schedule::finish_sum() {
  const Unwatched unwatched;
  const auto held = lock();
  auto* const unit = std::exchange(reducing_, nullptr);
  if (unit == nullptr) return;
  auto& reduction = state_of(*unit).reduction;
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
  for (auto* unit : members_) state_of(*unit).reduction.expect_synced();
}

void Schedule::expect_writable(const Unit& unit) const {
  if (!unit.flags().is_pinned()) return;
  throw UsageError(
      "a shard of unit '{}' would be written while the unit is in use unsharded (inside tessera::full_params, or by another "
      "thread), and the unsharded copy would keep the old values; write the shard after that use has ended",
      unit.name());
}

void Schedule::done_reading(Unit& unit) {
  const auto held = lock();
  unit.mesh().world().enter(kWriting, unit.name());
  finish_reductions();
  if (!unit.flags().is_pinned()) reshard(unit);
  state_of(unit).versions.done_reading();
}

void Schedule::note_written(Unit& unit) {
  const auto held = lock();
  if (std::ranges::find(written_, &unit) == written_.end()) written_.push_back(&unit);
}

void Schedule::flush(Unit& unit) {
  const Unwatched unwatched;
  const auto held = lock();
  if (!unit.flags().is_pinned()) state_of(unit).versions.publish();
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
  if (auto* unit = std::exchange(reducing_, nullptr)) state_of(*unit).reduction.abandon();
  for (auto* unit : std::exchange(arriving_, {})) state_of(*unit).reduction.abandon();
  reduced_.clear();
  reshard_where([](Unit&) { return true; });
}

void Schedule::prefetch(Unit& unit) {
  const Unwatched unwatched;
  const auto held = lock();
  if (!state_of(unit).has_memory()) {
    while (!written_.empty()) flush(*written_.back());
    unshard(unit, {});
  }
  state_of(unit).note_early(UnitState::Early::AskedFor);
}

void Schedule::wait_for(Unit& unit) {
  const Unwatched unwatched;
  const auto held = lock();
  if (!state_of(unit).has_memory()) return;  // the unit was resharded after prefetch()
  Unit* const units[] = {&unit};
  wait_and_pin(units);
  release(units);
}

void Schedule::reshard_all() {
  const auto held = lock();
  if (!reduces_in_order()) reshard_where([](Unit&) { return true; });
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

void Schedule::reset_counters() {
  const auto held = lock();
  live_counters_.peak_bytes = live_counters_.live_bytes;
  misses_ = 0;
}

}  // namespace tessera
