// Rate: steps per second over the last few seconds, so that it is current but does not show the jitter of single steps.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>

namespace tessera::train {

class Rate {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void add(Time time, int64_t step);
  /// Returns nothing before the first step.
  std::optional<double> per_second() const;

 private:
  struct Sample {
    Time time;
    int64_t step;
  };
  std::deque<Sample> samples_;
};

}  // namespace tessera::train
