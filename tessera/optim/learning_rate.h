// How the learning rate changes over a run: a value, to be asked for the rate of a step, kept with a checkpoint and compared.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::optim {

struct LearningRate {
  enum class Shape {
    Constant,
    Steps,   // times `factor` after every `every` steps
    Cosine,  // down to `last` over `steps`, along half a wave
  };

  double base = 1e-3;
  Shape shape = Shape::Constant;
  int64_t warmup = 0;   // steps over which it rises in a line to where the shape begins
  double factor = 0.1;  // Steps
  int64_t every = 1;    // Steps: an epoch's number of steps times how many epochs
  int64_t steps = 1;    // Cosine: of the whole run, the warm-up included
  double last = 0;      // Cosine

  /// The rate for a step, counted from 0. Throws UsageError if the settings make no sense.
  double at(int64_t step) const;

  /// One line of text, and back.
  std::string save() const;
  static LearningRate load(const std::string& text);

  bool operator==(const LearningRate&) const = default;
};

}  // namespace tessera::optim
