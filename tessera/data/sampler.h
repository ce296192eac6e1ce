// Sampler: decides which samples a rank gets in which step. A global batch has the same samples for any number of ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::data {

enum class Order {
  Shuffled,  // differently in every epoch
  AsStored,
};

/// What happens to the last samples of an epoch if they do not fill a global batch.
enum class Tail {
  Drop,  // they are left out; with Order::Shuffled these are different samples in every epoch
  Fill,  // the batch is filled up with samples from the beginning of the epoch, which are counted in Part::repeats
};

struct SamplerOptions {
  int64_t size = 0;                    // number of samples in the data set
  int64_t global_batch = 0;            // samples of one step on all ranks together; each rank gets an equal part
  std::vector<int> local_ranks = {0};  // the ranks that this process stands for, ascending: Communicator::local_ranks()
  int ranks = 1;
  Order order = Order::Shuffled;
  Tail tail = Tail::Drop;
  uint64_t seed = 0;
};

/// A position between two batches. Save it to resume later; it is valid for any number of ranks.
struct Position {
  int64_t epoch = 0;
  int64_t batch = 0;  // from 0 to the number of batches, which means the end of the epoch

  /// One line of text; load() is the inverse, and throws UsageError for text of another form.
  std::string save() const;
  static Position load(const std::string& text);

  bool operator==(const Position&) const = default;
};

/// This process's part of a batch: the samples of each of its local ranks, one rank after the other.
struct Part {
  std::vector<int64_t> numbers;
  /// A seed for each sample, for what is drawn to augment it. It depends only on the sampler's seed, the epoch and the sample's number.
  std::vector<uint64_t> seeds = {};
  int64_t repeats = 0;  // how many samples at its end only fill the batch (Tail::Fill)
};

class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options);

  /// The number of batches in an epoch, which is the same for every rank.
  int64_t batches() const { return batches_; }

  /// This process's part of a batch. It depends only on the options and the position. Not thread-safe, because the order of one epoch is
  /// cached.
  Part part(const Position& position);

  /// Samples of one step on all ranks together.
  int64_t global_batch() const { return options_.global_batch; }
  /// What the order of samples depends on, beside the position: "6000 samples, shuffled with seed 42, the last dropped".
  std::string order() const;

 private:
  void arrange(int64_t epoch);

  SamplerOptions options_;
  int64_t batches_ = 0;
  int64_t epoch_ = -1;  // the epoch to which order_ belongs
  std::vector<int64_t> order_;
};

}  // namespace tessera::data
