// Position: a place between two batches of a run.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::data {

/// Save it to resume later; it is valid for any number of ranks.
struct Position {
  int64_t epoch = 0;
  int64_t batch = 0;  // from 0 to the number of batches, which means the end of the epoch
  int64_t first = 0;  // samples of the epoch that came before batch 0, in batches of another size

  /// One line of text; load() is the inverse, and throws UsageError for text of another form.
  std::string save() const;
  static Position load(const std::string& text);

  bool operator==(const Position&) const = default;
};

/// The seed for augmenting a sample. It depends on nothing else, so that a run is the same with any number of ranks and workers.
uint64_t seed_of_sample(uint64_t seed, int64_t epoch, int64_t number);

/// The finalizer of splitmix64: changes every bit with the chance of one half if one bit of the value changes.
uint64_t scramble(uint64_t value);

}  // namespace tessera::data
