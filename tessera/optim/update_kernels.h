// Update loops: one pass over a range of values applies the gradient's factor, weight decay and the rule, and writes the cast copy.
#pragma once

#include <cstdint>

namespace tessera::optim {

/// A range of parameters, with the gradient and state of each. All arrays have `count` values.
struct UpdateRange {
  float* parameters = nullptr;
  const float* gradients = nullptr;
  float* first = nullptr;  // state; null if the rule has none
  float* second = nullptr;
  uint16_t* cast_copy = nullptr;  // bfloat16 copy of the parameters, to be written; null if there is none
  int64_t count = 0;
};

/// The first operations of all rules: g = factor * gradient + l2 * p, then p *= keep.
struct Common {
  float factor = 1;
  float l2 = 0;
  float keep = 1;
};

struct SgdRule {
  Common common;
  float lr = 0;
  float momentum = 0;
  float share = 1;  // factor of the gradient when it is added to the momentum
  bool nesterov = false;
};
/// range.first: momentum, or null for no momentum.
void update(const SgdRule& rule, const UpdateRange& range);

/// The weights of a moving average: average = kept * average + added * value. Each is rounded from double on its own, because in float32
/// 1 - 0.999 is larger than 0.001 by a relative 5e-5, which would change the length of every step by half of that.
struct Decay {
  Decay() = default;
  explicit Decay(double beta) : kept(static_cast<float>(beta)), added(static_cast<float>(1 - beta)) {}
  float kept = 0, added = 1;
};

struct AdamRule {
  Common common;
  float step = 0;  // learning rate / bias correction of the first moment
  Decay first, second;
  float correction = 1;  // square root of the bias correction of the second moment
  float eps = 0;
};
/// range.first, range.second: the moments.
void update(const AdamRule& rule, const UpdateRange& range);

struct AdagradRule {
  Common common;
  float lr = 0;
  float eps = 0;
};
/// range.first: sum of squared gradients.
void update(const AdagradRule& rule, const UpdateRange& range);

struct LionRule {
  Common common;
  float lr = 0;
  Decay update, momentum;
};
/// range.first: the momentum.
void update(const LionRule& rule, const UpdateRange& range);

/// LAMB takes two passes, because the length of a step depends on the norm of the parameter's update over all ranks.
struct LambRule {
  AdamRule adam;               // its `step` is not used
  float first_correction = 1;  // bias correction of the first moment
  float decay = 0;             // weight decay, which is added to the update
};
struct Squares {
  double parameters = 0, update = 0;
};
/// First pass: updates the moments, and returns the sums of squares of the parameters and of their update.
Squares prepare(const LambRule& rule, const UpdateRange& range);
/// Second pass: subtracts the update, times `step`, from the parameters.
void apply_update(const LambRule& rule, float step, const UpdateRange& range);

}  // namespace tessera::optim
