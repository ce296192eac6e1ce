#include "tessera/train/rate.h"

namespace tessera::train {
namespace {

constexpr std::chrono::seconds kWindow(5);
constexpr std::chrono::milliseconds kApart(100);  // samples that are closer together are merged, so that few are stored

}  // namespace

void Rate::add(Time time, int64_t step) {
  if (samples_.size() > 1 && time - samples_[samples_.size() - 2].time < kApart) {
    samples_.back() = {.time = time, .step = step};
  } else {
    samples_.push_back({.time = time, .step = step});
  }
  // One sample before the window is kept, so that there are always two samples to compute a rate from, even if steps are slow.
  while (samples_.size() > 2 && time - samples_[1].time >= kWindow) samples_.pop_front();
}

std::optional<double> Rate::per_second() const {
  if (samples_.size() < 2) return std::nullopt;
  const auto steps = static_cast<double>(samples_.back().step - samples_.front().step);
  const std::chrono::duration<double> seconds = samples_.back().time - samples_.front().time;
  if (steps <= 0 || seconds.count() <= 0) return std::nullopt;
  return steps / seconds.count();
}

}  // namespace tessera::train
