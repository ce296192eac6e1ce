// One pass over memory for each range of values: the gradient's factor, weight decay, the rule, and the cast copy that other ranks
// read.
#pragma once

#include <cstdint>

namespace tessera::optim {

/// Values that lie one after the other, with what belongs to each of them.
struct UpdateRange {
  float* parameters = nullptr;
  const float* gradients = nullptr;
  float* first = nullptr;  // state, as far as the rule has any
  float* second = nullptr;
  uint16_t* cast_copy = nullptr;  // the parameters in bfloat16, if somebody wants them
  int64_t count = 0;
};

/// What all rules do first: g = factor * gradient + l2 * p, and p *= keep.
struct Common {
  float factor = 1;
  float l2 = 0;
  float keep = 1;
};

struct SgdRule {
  Common common;
  float lr = 0;
  float momentum = 0;
  float share = 1;  // of the gradient in the momentum
  bool nesterov = false;
};
/// first: the momentum; none if there is no state.
void update(const SgdRule& rule, const UpdateRange& range);

/// How much of an average kept, and how much of the new value added. Each is rounded by itself: in float32, 1 - 0.999 is five parts in a
/// hundred thousand more than 0.001, and every step would be too long or too short by half of that.
struct Decay {
  Decay() = default;
  explicit Decay(double beta) : kept(static_cast<float>(beta)), added(static_cast<float>(1 - beta)) {}
  float kept = 0, added = 1;
};

struct AdamRule {
  Common common;
  float step = 0;  // the rate over the first moment's correction
  Decay first, second;
  float correction = 1;  // square root of the second moment's
  float eps = 0;
};
/// first, second: moments.
void update(const AdamRule& rule, const UpdateRange& range);

struct AdagradRule {
  Common common;
  float lr = 0;
  float eps = 0;
};
/// first: sum of squares.
void update(const AdagradRule& rule, const UpdateRange& range);

struct LionRule {
  Common common;
  float lr = 0;
  Decay update, momentum;
};
/// first: the momentum.
void update(const LionRule& rule, const UpdateRange& range);

/// LAMB knows how far to go only when it knows how long the update is, for each parameter over all ranks: so it takes two passes.
struct LambRule {
  AdamRule adam;               // its step is not used
  float first_correction = 1;  // of the first moment
  float decay = 0;             // part of the update
};
struct Squares {
  double parameters = 0, update = 0;
};
/// Moves the moments on; gives the sums of squares of the parameters and of the update that they are to go.
Squares prepare(const LambRule& rule, const UpdateRange& range);
/// Goes that update, times `step`.
void apply_update(const LambRule& rule, float step, const UpdateRange& range);

/// Moments in eight bits, in blocks that have a scale each: the first as sign and square root, the second as fourth root, so that small
/// values keep their size.
inline constexpr int64_t kBlock = 256;
struct SmallMoments {
  int8_t* first = nullptr;
  uint8_t* second = nullptr;
  float* first_scales = nullptr;
  float* second_scales = nullptr;
};
void update(const AdamRule& rule, const UpdateRange& range, const SmallMoments& moments);

}  // namespace tessera::optim
