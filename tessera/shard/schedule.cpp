#include "tessera/shard/schedule.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "tessera/shard/residence.h"
#include "tessera/shard/unit.h"

namespace tessera {
namespace {

/// A function of its own, so that the thread sanitizer can be told about the engine's lock inside, half of which it does not see.
[[gnu::noinline]] void call_when_backward_ends(std::function<void()> call) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(call));
}

/// Ends the backward pass of a schedule, once. The engine keeps it until it is through, or gives up.
class EndOfBackward {
 public:
  explicit EndOfBackward(std::function<void()> end) : end_(std::move(end)) {}
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;
  ~EndOfBackward() { now(); }

  void now() {
    if (const auto end = std::exchange(end_, nullptr)) end();
  }

 private:
  std::function<void()> end_;
};

}  // namespace

Schedule::Pass Schedule::pass_now() const {
  if (torch::autograd::get_current_graph_task_id() != -1) return Pass::Backward;
  return c10::GradMode::is_enabled() ? Pass::Training : Pass::Evaluation;
}

void Schedule::enter(Pass pass) {
  if (pass == pass_) return;
  // A pass that was complete becomes the record of its kind. Backward passes end by themselves, forward ones by what follows.
  auto& ended = order(pass_);
  if (!ended.current.empty()) ended.recorded = std::move(ended.current);
  ended.current.clear();
  auto& begins = order(pass);
  begins.current.clear();
  begins.trusted = !begins.recorded.empty();
  pass_ = pass;
  if (pass == Pass::Backward) {
    // What no UnitNode frees (frozen units, gradients of inputs only) is freed when the engine is through. Where an exception stops it,
    // it drops its callbacks without a call.
    const auto end = std::make_shared<EndOfBackward>([weak = weak_from_this()] {
      if (const auto schedule = weak.lock()) schedule->end_backward();
    });
    call_when_backward_ends([end] { end->now(); });
  }
}

void Schedule::end_backward() {
  const auto held = lock();
  enter(Pass::None);
  free_all();
}

void Schedule::record(Unit& unit) {
  auto& now = order(pass_);
  if (!now.current.empty() && now.current.back() == &unit) return;
  // A forward pass that begins as the recorded one did, where that one ended, is the next of several (evaluation, accumulation).
  if (now.trusted && now.current.size() == now.recorded.size() && now.recorded.front() == &unit) now.current.clear();
  const auto position = now.current.size();
  now.current.push_back(&unit);
  if (!now.trusted) return;
  if (position >= now.recorded.size() || now.recorded[position] != &unit) {
    now.trusted = false;
    counters_.misses++;
  }
}

bool Schedule::used_later(const Unit& unit) const {
  const auto& now = orders_[static_cast<size_t>(pass_)];
  const auto rest = std::span(now.recorded).subspan(std::min(now.current.size(), now.recorded.size()));
  return std::ranges::find(rest, &unit) != rest.end();
}

void Schedule::make_room(std::span<Unit* const> wanted) {
  const auto is_wanted = [&](const Unit* unit) { return std::ranges::find(wanted, unit) != wanted.end(); };
  const bool trusted = order(pass_).trusted;
  const auto missing = static_cast<size_t>(std::ranges::count_if(wanted, [](const Unit* unit) { return !unit->whole(); }));
  auto old = live_;
  size_t live = old.size();
  for (auto* unit : old) {
    if (unit->pinned() || is_wanted(unit)) continue;
    const bool over = live + missing > static_cast<size_t>(max_live_units_);
    if (trusted ? !used_later(*unit) : over) {
      give_back(*unit);
      live--;
    }
  }
}

void Schedule::use(std::span<Unit* const> units, const Fault& fault) {
  const auto held = lock();
  enter(pass_now());
  // By far the most frequent case: one operator after the other of a unit that is whole.
  const auto& uses = order(pass_).current;
  if (units.size() == 1 && units.front()->whole() && !uses.empty() && uses.back() == units.front()) {
    units.front()->pin();
    return;
  }
  for (auto* unit : units) record(*unit);
  make_room(units);
  for (auto* unit : units) {
    if (!unit->whole()) {
      unit->read(fault);
      counters_.live_bytes += unit->whole_bytes();
      counters_.peak_bytes = std::max(counters_.peak_bytes, counters_.live_bytes);
    } else {
      std::erase(live_, unit);
    }
    live_.push_back(unit);
    unit->pin();
  }
}

void Schedule::release(std::span<Unit* const> units) {
  for (auto* unit : units) unit->unpin();
}

void Schedule::reduced(Unit& unit) {
  if (unit.whole() && !unit.pinned()) give_back(unit);
}

void Schedule::about_to_write(Unit& unit) {
  const auto held = lock();
  if (unit.whole() && !unit.pinned()) give_back(unit);
  unit.about_to_write();
}

void Schedule::free_all() {
  const auto held = lock();
  const auto old = live_;
  for (auto* unit : old) {
    if (!unit->pinned()) give_back(*unit);
  }
}

void Schedule::forget(const Unit& unit) {
  const auto held = lock();
  std::erase_if(live_, [&](const Unit* known) { return known == &unit; });
  for (auto& order : orders_) order = {};
}

void Schedule::give_back(Unit& unit) {
  counters_.live_bytes -= unit.whole_bytes();
  unit.give_back();
  std::erase(live_, &unit);
}

void Schedule::reset_counters() {
  const auto held = lock();
  counters_.peak_bytes = counters_.live_bytes;
  counters_.misses = 0;
}

}  // namespace tessera
