// Learning-rate schedules. A schedule is a value, which can be saved in a checkpoint and compared.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::optim {

struct LearningRate {
  enum class Shape {
    Constant,
    Steps,       // multiplied by `factor` after every `every` steps
    Cosine,      // from `base` down to `last`, along half a cosine wave
    Linear,      // from `base` down to `last`, by the same amount in each step
    StepsOfRun,  // as Steps, but counted from the first step of the run, and not from the end of the warm-up
  };

  double base = 1e-3;
  Shape shape = Shape::Constant;
  int64_t warmup = 0;   // number of steps over which the rate rises linearly to `base`; the shape begins after them
  double factor = 0.1;  // Steps, StepsOfRun
  int64_t every = 1;    // Steps, StepsOfRun: a number of steps; for n epochs, n times the steps of an epoch
  int64_t steps = 0;    // Cosine, Linear: the length of the run, including the warm-up; must be given
  double last = 0;      // Cosine, Linear: the rate at the end

  /// The rate for a step, counted from 0. Throws UsageError if the settings make no sense.
  double at(int64_t step) const;

  /// One line of text; load() is the inverse, and throws UsageError for text of another form.
  std::string save() const;
  static LearningRate load(const std::string& text);

  bool operator==(const LearningRate&) const = default;
};

}  // namespace tessera::optim
