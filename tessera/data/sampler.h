// Which samples a rank sees, and when: the same ones, in the same global batches, whatever the number of ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::data {

enum class Order {
  Shuffled,  // anew in every epoch
  AsStored,
};

/// What becomes of the last samples of an epoch when they do not fill a global batch.
enum class Tail {
  Drop,  // they are left out; shuffled, they are others in every epoch
  Fill,  // the batch is filled with samples from the epoch's beginning, and says how many those are
};

struct SamplerOptions {
  int64_t size = 0;          // of the data set
  int64_t global_batch = 0;  // samples of one step on all ranks together; each rank gets an equal part
  int rank = 0;
  int ranks = 1;
  Order order = Order::Shuffled;
  Tail tail = Tail::Drop;
  uint64_t seed = 0;
};

/// A place between two batches. It means the same for every number of ranks; save it to go on later.
struct Position {
  int64_t epoch = 0;
  int64_t batch = 0;  // from 0 to the number of batches: then the epoch is at its end
  bool operator==(const Position&) const = default;
};

/// This rank's part of a batch.
struct Part {
  std::vector<int64_t> numbers;
  int64_t repeats = 0;  // so many at its end only fill it
};

class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options);

  /// Batches of an epoch, the same for every rank.
  int64_t batches() const { return batches_; }

  /// Depends on options and position alone. Not from several threads at once: the order of one epoch is kept.
  Part part(const Position& position);

 private:
  void arrange(int64_t epoch);

  SamplerOptions options_;
  int64_t batches_ = 0;
  int64_t epoch_ = -1;  // whose order this is
  std::vector<int64_t> order_;
};

}  // namespace tessera::data
