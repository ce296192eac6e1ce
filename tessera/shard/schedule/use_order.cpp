#include "tessera/shard/schedule/use_order.h"

#include <algorithm>
#include <set>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kLongestPass = 1 << 12;  // number of uses; the order of a longer pass is not learned

}  // namespace

void UseOrder::begin() {
  current_.clear();
  trusted_ = !recorded_.empty();
  next_ = 0;
}

void UseOrder::end() {
  if (!current_.empty()) std::swap(recorded_, current_);  // a swap rather than a move, so that both keep their memory
  current_.clear();
}

std::span<Unit* const> UseOrder::to_come() const {
  return trusted_ ? std::span(recorded_).subspan(next_) : std::span<Unit* const>();
}

bool UseOrder::record(Unit* unit) {
  if (used_last(unit)) return true;
  // The recorded pass is complete and its first unit is used again: this is the next of several forward passes (evaluation, accumulation).
  if (trusted_ && next_ == recorded_.size() && recorded_.front() == unit) {
    current_.clear();
    next_ = 0;
  }
  current_.push_back(unit);
  // If the last unit of a pass is also the first of the next one, the two uses count as one, so the recorded pass begins with the second
  // unit of the pass.
  if (trusted_ && next_ == 0 && recorded_.front() != unit && recorded_.back() == unit) return true;
  if (current_.size() > kLongestPass) current_.erase(current_.begin(), current_.begin() + kLongestPass / 2);
  if (!trusted_) {
    if (pass_ == Pass::Evaluation) trusted_ = learn_from_repetition();
    return true;
  }
  trusted_ = next_ < recorded_.size() && recorded_[next_] == unit;
  if (trusted_) next_++;
  return trusted_;
}

/// Looks for a sequence of uses that occurs twice in a row at the end of `current_`, and records it as a complete pass. Returns whether it
/// found such a sequence.
bool UseOrder::learn_from_repetition() {
  const auto all = std::span(current_);
  for (size_t length = 1; 2 * length <= all.size(); length++) {
    const auto last = all.last(length);
    if (all[all.size() - 1 - length] != all.back() || !std::ranges::equal(last, all.last(2 * length).first(length))) continue;
    // A repetition inside a pass is not a pass: it leaves out units that were used shortly before.
    const auto lately = all.last(std::min(all.size(), 4 * length));
    const std::set<Unit*> repeated(last.begin(), last.end());
    if (std::ranges::any_of(lately, [&](Unit* unit) { return !repeated.contains(unit); })) continue;
    recorded_.assign(last.begin(), last.end());
    next_ = length;
    return true;
  }
  return false;
}

}  // namespace tessera
