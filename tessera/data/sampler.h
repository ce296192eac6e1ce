// Sampler: decides which samples a rank gets in which step. A global batch has the same samples for any number of ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/data/position.h"
#include "tessera/data/share.h"

namespace tessera::data {

enum class Order {
  Shuffled,  // differently in every epoch
  AsStored,
};

struct SamplerOptions {
  int64_t size = 0;                    // number of samples in the data set
  int64_t global_batch = 0;            // samples of one step on all ranks together; each rank gets an equal part
  std::vector<int> local_ranks = {0};  // the ranks whose samples this process takes, ascending: Communicator::local_ranks()
  int ranks = 1;
  Order order = Order::Shuffled;
  Tail tail = Tail::Drop;
  uint64_t seed = 0;
  /// Returns the numbers of the samples of an epoch, in place of `order`. A sample may come several times or not at all, for example to
  /// balance classes. The function must return the same on every rank.
  std::function<std::vector<int64_t>(int64_t epoch)> sampler = {};
  /// Returns the batches of an epoch, in place of `order` and `global_batch`. A batch has the samples of one step on all ranks together,
  /// and may have any size, for example to put texts of similar length together. The function must return the same on every rank.
  std::function<std::vector<std::vector<int64_t>>(int64_t epoch)> batch_sampler = {};
};

/// This process's part of a batch: the samples of each of its local ranks, one rank after the other.
struct Part {
  std::vector<int64_t> numbers;
  std::vector<uint64_t> seeds = {};  // seed_of_sample() for each sample
  std::vector<Share> shares = {};    // the share of each local rank
  int64_t repeats = 0;               // how many samples at the end only fill the batch
};

class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options);

  /// The number of batches in an epoch after its `first` samples (Position::first). It is the same on every rank; a batch_sampler may give
  /// epochs different numbers. Throws UsageError if the epoch has fewer samples than `first`.
  int64_t batches(int64_t epoch = 0, int64_t first = 0);

  /// This process's part of a batch. It depends only on the options and the position. Not thread-safe, because the order of one epoch is
  /// cached.
  Part part(const Position& position);

  /// Samples of one step on all ranks together; 0 with a batch_sampler.
  int64_t global_batch() const { return division_.global_batch(); }
  int ranks() const { return division_.ranks(); }
  /// Describes everything but the position that the order of samples depends on: "6000 samples, shuffled with seed 42, the last dropped".
  std::string order() const { return order_in_words_; }
  /// Makes part() return the parts of all ranks from now on.
  void take_all_ranks() { division_.take_all_ranks(); }

 private:
  bool has_own_order() const { return options_.sampler || options_.batch_sampler; }
  void arrange(int64_t epoch);
  void take_own_order(int64_t epoch);
  void shuffle(int64_t epoch);
  std::string describe() const;

  SamplerOptions options_;
  Division division_;
  int64_t epoch_ = -1;  // the epoch of order_ and ends_; -1: of none
  std::vector<int64_t> order_;
  std::vector<int64_t> ends_;  // with a batch_sampler: where each batch ends in order_
  std::string order_in_words_;
};

}  // namespace tessera::data
