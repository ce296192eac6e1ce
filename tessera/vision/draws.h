// Random numbers that depend only on a seed, not on the machine or the library.
#pragma once

#include <cstdint>

namespace tessera::vision {

/// The draws of one sample, one after the other: the n-th is a function of the seed and n.
class Draws {
 public:
  explicit Draws(uint64_t seed);

  /// From `from` up to, but without, `to`.
  double uniform(double from, double to);
  /// 0 ... n - 1
  int64_t below(int64_t n);
  /// True with this probability.
  bool chance(double probability);

 private:
  uint64_t next();

  uint64_t state_;
};

}  // namespace tessera::vision
