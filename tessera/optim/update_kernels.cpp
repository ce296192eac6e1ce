#include "tessera/optim/update_kernels.h"

#include <bit>
#include <cmath>

#include "tessera/base/kernel.h"

namespace tessera::optim {
namespace {

/// Rounds to nearest even. NaN stays NaN.
[[gnu::always_inline]] inline uint16_t to_bfloat(float number) {
  const auto bits = std::bit_cast<uint32_t>(number);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(number == number ? rounded : 0x7fc0);
}

/// Calls `rule(p, g, first, second)` for each value and stores the changed values. State that does not exist is passed as 0.
template <bool kFirst, bool kSecond, bool kCastCopy, class Rule>
[[gnu::always_inline]] inline void go_through(const UpdateRange& s, const Common& common, const Rule& rule) {
  auto* const parameters = s.parameters;
  const auto* const gradients = s.gradients;
  auto* const firsts = s.first;
  auto* const seconds = s.second;
  auto* const cast_copy = s.cast_copy;
#pragma GCC ivdep
  for (int64_t i = 0; i < s.count; i++) {
    float p = parameters[i], first = 0, second = 0;
    const float g = common.factor * gradients[i] + common.l2 * p;
    p *= common.keep;
    if constexpr (kFirst) first = firsts[i];
    if constexpr (kSecond) second = seconds[i];
    rule(p, g, first, second);
    parameters[i] = p;
    if constexpr (kFirst) firsts[i] = first;
    if constexpr (kSecond) seconds[i] = second;
    if constexpr (kCastCopy) cast_copy[i] = to_bfloat(p);
  }
}

template <bool kFirst, bool kSecond, class Rule>
[[gnu::always_inline]] inline void go_through(const UpdateRange& s, const Common& common, const Rule& rule) {
  if (s.cast_copy != nullptr) return go_through<kFirst, kSecond, true>(s, common, rule);
  go_through<kFirst, kSecond, false>(s, common, rule);
}

[[gnu::always_inline]] inline float adam_update(const AdamRule& r, float g, float& first, float& second) {
  first += r.first.added * (g - first);
  second = r.second.kept * second + r.second.added * g * g;
  return first / (std::sqrt(second) / r.correction + r.eps);
}

}  // namespace

TESSERA_KERNEL void update(const SgdRule& r, const UpdateRange& s) {
  const SgdRule rule = r;
  if (s.first == nullptr) {
    return go_through<false, false>(
        s, rule.common, [&](float& p, float g, float&, float&) __attribute__((always_inline)) { p -= rule.lr * g; });
  }
  const float of_gradient = rule.nesterov ? 1 : 0, of_momentum = rule.nesterov ? rule.momentum : 1;
  go_through<true, false>(
      s, rule.common, [&](float& p, float g, float& momentum, float&) __attribute__((always_inline)) {
        momentum = rule.momentum * momentum + rule.share * g;
        p -= rule.lr * (of_gradient * g + of_momentum * momentum);
      });
}

TESSERA_KERNEL void update(const AdamRule& r, const UpdateRange& s) {
  const AdamRule rule = r;
  go_through<true, true>(
      s, rule.common, [&](float& p, float g, float& first, float& second) __attribute__((always_inline)) {
        p -= rule.step * adam_update(rule, g, first, second);
      });
}

TESSERA_KERNEL void update(const AdagradRule& r, const UpdateRange& s) {
  const AdagradRule rule = r;
  go_through<true, false>(
      s, rule.common, [&](float& p, float g, float& sum, float&) __attribute__((always_inline)) {
        sum += g * g;
        p -= rule.lr * g / (std::sqrt(sum) + rule.eps);
      });
}

TESSERA_KERNEL void update(const LionRule& r, const UpdateRange& s) {
  const LionRule rule = r;
  go_through<true, false>(
      s, rule.common, [&](float& p, float g, float& momentum, float&) __attribute__((always_inline)) {
        const float update = rule.update.kept * momentum + rule.update.added * g;
        p -= rule.lr * static_cast<float>((update > 0) - (update < 0));
        momentum = rule.momentum.kept * momentum + rule.momentum.added * g;
      });
}

TESSERA_KERNEL Squares prepare(const LambRule& r, const UpdateRange& s) {
  const LambRule rule = r;
  constexpr int64_t kPart = 1024;  // squares of this many values are added in float32, their sums in double
  Squares all;
  for (int64_t begin = 0; begin < s.count; begin += kPart) {
    const int64_t end = begin + kPart < s.count ? begin + kPart : s.count;
    float parameters = 0, update = 0;
#pragma GCC ivdep
    for (int64_t i = begin; i < end; i++) {
      const float p = s.parameters[i];
      float first = s.first[i], second = s.second[i];
      const float step =
          adam_update(rule.adam, rule.adam.common.factor * s.gradients[i], first, second) / rule.first_correction + rule.decay * p;
      s.first[i] = first;
      s.second[i] = second;
      parameters += p * p;
      update += step * step;
    }
    all.parameters += parameters;
    all.update += update;
  }
  return all;
}

TESSERA_KERNEL void apply_update(const LambRule& r, float step, const UpdateRange& s) {
  const LambRule rule = r;
  go_through<true, true>(
      s, {}, [&](float& p, float, float& first, float& second) __attribute__((always_inline)) {
        p -= step * (first / (std::sqrt(second) / rule.adam.correction + rule.adam.eps) / rule.first_correction + rule.decay * p);
      });
}

}  // namespace tessera::optim
