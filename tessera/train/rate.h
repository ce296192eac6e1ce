// Steps per second over the last few seconds: what is true now, without the jitter of single steps.
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
  /// Nothing as long as there was no step.
  std::optional<double> per_second() const;

 private:
  struct Mark {
    Time time;
    int64_t step;
  };
  std::deque<Mark> marks_;
};

}  // namespace tessera::train
