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

void Schedule::reset_counters() {
  const auto held = lock();
  live_counters_.peak_bytes = live_counters_.live_bytes;
  misses_ = 0;
}

}  // namespace tessera
