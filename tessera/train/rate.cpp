#include "tessera/train/rate.h"

namespace tessera::train {
namespace {

constexpr std::chrono::seconds kWindow(5);
constexpr std::chrono::milliseconds kApart(100);  // closer marks become one, so that there are few

}  // namespace

void Rate::add(Time time, int64_t step) {
  if (marks_.size() > 1 && time - marks_[marks_.size() - 2].time < kApart) {
    marks_.back() = {.time = time, .step = step};
  } else {
    marks_.push_back({.time = time, .step = step});
  }
  // The first mark lies at the window's edge or just before it: slow steps still have two.
  while (marks_.size() > 2 && time - marks_[1].time >= kWindow) marks_.pop_front();
}

std::optional<double> Rate::per_second() const {
  if (marks_.size() < 2) return std::nullopt;
  const auto steps = static_cast<double>(marks_.back().step - marks_.front().step);
  const std::chrono::duration<double> seconds = marks_.back().time - marks_.front().time;
  if (steps <= 0 || seconds.count() <= 0) return std::nullopt;
  return steps / seconds.count();
}

}  // namespace tessera::train
