// How the samples of a batch are divided among ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::data {

/// What happens to the last samples of an epoch if they do not fill a global batch.
enum class Tail {
  Drop,  // they are left out; with Order::Shuffled, other samples are left out in every epoch
  Fill,  // the batch is filled up with samples from the beginning of the epoch, which count as repeats: even_batches of Accelerate
  Keep,  // the batch is smaller, and the parts of ranks differ by one sample at most: even_batches=False
};

/// A rank's part of a batch: `rows` samples from `first` on.
struct Share {
  int64_t first = 0, rows = 0;
  int64_t repeats = 0;  // how many samples at the end only fill the batch
  double weight = 1;    // Samples::weight
};

/// Returns where a rank's part begins if the parts of ranks differ by one sample at most, with the longer parts on the first ranks.
int64_t part_begin(int64_t length, int rank, int ranks);

class Division {
 public:
  /// A global batch of 0 means batches of any size. Errors begin with `owner`.
  Division(std::string owner, int64_t global_batch, std::vector<int> local_ranks, int ranks, Tail tail);

  /// expect_size() throws UsageError if batches have no fixed size, and expect_batch() if so many samples make no batch.
  void expect_size() const;
  void expect_batch(int64_t samples) const;
  /// The number of batches that so many samples make.
  int64_t batches(int64_t samples) const;
  /// The part of each local rank in a batch of so many samples. With Tail::Keep, or if batches have any size, a rank for which no sample is
  /// left gets the first sample with weight 0, so that all ranks run the model together. Throws UsageError if the ranks of one process
  /// would have parts of different sizes.
  std::vector<Share> shares(int64_t samples) const;
  /// Makes shares() return the parts of all ranks from now on.
  void take_all_ranks();
  int64_t global_batch() const { return global_batch_; }
  int ranks() const { return ranks_; }
  Tail tail() const { return tail_; }

 private:
  std::string owner_;
  int64_t global_batch_;
  std::vector<int> local_ranks_;
  int ranks_;
  Tail tail_;
  bool for_others_ = false;
};

}  // namespace tessera::data
