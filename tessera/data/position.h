// Position: a place between two batches of a run.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::data {

/// Tells where a run resumes. It is valid for any number of ranks.
struct Position {
  int64_t epoch = 0;
  int64_t batch = 0;  // the next batch; the number of batches means the end of the epoch
  int64_t first = 0;  // samples of the epoch that came before batch 0: those of a run that had batches of another size

  /// One line of text; load() is the inverse, and throws UsageError for text of another form.
  std::string save() const;
  static Position load(const std::string& text);

  bool operator==(const Position&) const = default;
};

/// The seed for augmenting a sample. It depends on nothing but its arguments, so that a run is the same with any number of ranks and
/// workers.
uint64_t seed_of_sample(uint64_t seed, int64_t epoch, int64_t number);

/// The finalizer of splitmix64: changes every bit with the chance of one half if one bit of the value changes.
uint64_t scramble(uint64_t value);

}  // namespace tessera::data
