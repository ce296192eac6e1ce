// Loader: fetches batches in background threads and delivers them in order.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "tessera/data/batch_iterator.h"
#include "tessera/data/sampler.h"
#include "tessera/data/samples.h"

namespace tessera::data {

/// Makes a batch of the samples with these numbers. It is called by several threads at once, with gradients disabled.
using Fetch = std::function<Samples(std::span<const int64_t> numbers)>;
/// The same for batches that are augmented at random: whatever is drawn for sample i comes from seeds[i], which is another one in every
/// epoch. Then a run has the same batches with any number of ranks and workers, and after a resume.
using SeededFetch = std::function<Samples(std::span<const int64_t> numbers, std::span<const uint64_t> seeds)>;

/// What becomes of a tensor of a batch, such as its way to a device.
using Place = std::function<at::Tensor(const at::Tensor& rows)>;

struct LoaderOptions {
  int workers = 2;      // threads; with 0, next() fetches each batch itself
  int ahead = 4;        // how many batches are fetched in advance
  Position start = {};  // where to resume: the position() of an earlier loader
};

class Loader {
 public:
  Loader(Sampler sampler, Fetch fetch, const LoaderOptions& options = {});
  Loader(Sampler sampler, SeededFetch fetch, const LoaderOptions& options = {});
  Loader(Loader&&) = delete;
  ~Loader();  // waits until the workers have finished their present batches

  /// The next batch of the epoch, or nothing at its end; the call after that begins the next epoch. If fetch throws, next() throws the same
  /// exception with the position in front of its message. It then stays at that batch, so another call throws again.
  std::optional<Samples> next();

  /// Goes to another position, before the first batch or in the middle of an epoch. Throws UsageError for one that an epoch does not have.
  void seek(const Position& position);
  /// From the next batch on, what is fetched is put there by the worker that has fetched it. To be called between two calls of next().
  void place(Place place);
  /// The position of the batch that next() will return.
  Position position() const { return position_; }
  /// A number that grows with each batch that is taken from any loader: the last one of this loader, 0 before its first batch.
  uint64_t last_taken() const { return last_taken_; }
  /// The number of batches in an epoch.
  int64_t batches() const { return sampler_.batches(); }
  /// Samples of one batch on all ranks together.
  int64_t global_batch() const { return sampler_.global_batch(); }
  /// What the order of samples depends on, in words.
  std::string order() const { return sampler_.order(); }

  /// Iterates over the rest of the epoch: for (auto& batch : loader)
  BatchIterator<Loader> begin() { return BatchIterator(*this); }
  std::default_sentinel_t end() { return {}; }

 private:
  struct Result {
    Samples batch;
    std::exception_ptr error;
  };

  void expect_place(const Position& position) const;
  void work();
  Result make(const Position& position, const Part& part, const Place& place) const;
  Result take_result();

  Sampler sampler_;
  SeededFetch fetch_;
  LoaderOptions options_;
  Position position_;
  uint64_t last_taken_ = 0;

  std::mutex mutex_;  // protects all members below, and the sampler if there are workers
  std::condition_variable news_;
  Position to_fetch_;
  Place place_;
  int64_t begun_ = 0, delivered_ = 0;  // numbers of batches, counted over all epochs
  std::map<int64_t, Result> ready_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace tessera::data
