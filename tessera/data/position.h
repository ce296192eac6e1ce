// Position: a place between two batches of a run.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::data {

/// Tells where a run resumes. It is valid for any number of ranks.
struct Position {
  int64_t epoch = 0;
  int64_t batch = 0;  // the next batch; at the end of an epoch, the number of its batches
  int64_t first = 0;  // the samples of the epoch before batch 0, which an earlier run took in batches of another size

  /// One line of text; load() is the inverse, and throws UsageError for text of another form.
  std::string save() const;
  static Position load(const std::string& text);

  bool operator==(const Position&) const = default;
};

/// Returns how many batches of `batch` samples the samples before a resume count as, to the nearest whole number.
constexpr int64_t batches_before(int64_t samples, int64_t batch) {
  return samples == 0 ? 0 : (samples + batch / 2) / batch;
}

/// The seed for augmenting a sample. It depends on nothing but its arguments, so that a run is the same with any number of ranks and
/// workers.
uint64_t seed_of_sample(uint64_t seed, int64_t epoch, int64_t number);

/// The finalizer of splitmix64: if one bit of the value changes, each bit of the result changes with a probability of one half.
uint64_t scramble(uint64_t value);

}  // namespace tessera::data
