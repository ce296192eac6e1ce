#include "tessera/vision/draws.h"

#include "tessera/base/error.h"
#include "tessera/data/position.h"

namespace tessera::vision {

// Seeds may be 0, 1, 2, ..., so they are scrambled: draws of one seed must not be those of the next one, shifted.
Draws::Draws(uint64_t seed) : state_(data::scramble(seed)) {}

uint64_t Draws::next() {
  const auto value = data::scramble(state_);
  state_ += 0x9e3779b97f4a7c15;  // splitmix64
  return value;
}

double Draws::uniform(double from, double to) {
  return from + (to - from) * (static_cast<double>(next() >> 11) * 0x1p-53);
}

int64_t Draws::below(int64_t n) {
  if (n < 1) throw UsageError("there is no number from 0 to {} to be drawn", n - 1);
  return static_cast<int64_t>(next() % static_cast<uint64_t>(n));
}

bool Draws::chance(double probability) {
  return uniform(0, 1) < probability;
}

}  // namespace tessera::vision
