// Loader: fetches batches in background threads and delivers them in order.
#pragma once

#include <c10/util/FunctionRef.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/data/batch_iterator.h"
#include "tessera/data/sampler.h"
#include "tessera/data/samples.h"
#include "tessera/data/source.h"
#include "tessera/data/stream.h"

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
  /// The target of samples that only fill a batch, such as the ignore_index of the loss: they don't count there, on whatever rank they are.
  std::optional<int64_t> target_of_repeats = {};
  /// Rank 0 of these fetches whole batches, and sends all ranks theirs, as dispatch_batches of Accelerate: for data that only one rank can
  /// read. next() is collective then, and the other ranks draw and fetch nothing. The source is the same on all ranks, made for all of
  /// them.
  std::optional<Communicator> dispatch = {};
  /// Each rank has a source of its own, which knows of no other ranks, and these may differ in length: a rank that runs out gets a batch of
  /// before again, with weight 0, until all have run out, as with PyTorch's Join. next() is collective then.
  std::optional<Communicator> join = {};
};

class Loader {
 public:
  Loader(Sampler sampler, Fetch fetch, const LoaderOptions& options = {});
  Loader(Sampler sampler, SeededFetch fetch, const LoaderOptions& options = {});
  explicit Loader(Stream stream, const LoaderOptions& options = {});
  explicit Loader(std::unique_ptr<Source> source, const LoaderOptions& options = {});
  Loader(Loader&&) = delete;
  ~Loader();  // waits until the workers have finished their present batches

  /// The next batch of the epoch, or nothing at its end; the call after that begins the next epoch. If fetch throws, next() throws the same
  /// exception with the position in front of its message. It then stays at that batch, so another call throws again.
  std::optional<Samples> next();
  /// Whether the batch that was taken last ends the epoch. Waits for the next one where only that can tell. Collective if next() is.
  bool at_end();

  /// Goes to another position, before the first batch or in the middle of an epoch. Throws UsageError for one that an epoch does not have.
  /// A stream is opened again.
  void seek(const Position& position);
  /// From the next batch on, what is fetched is put there by the worker that has fetched it. To be called between two calls of next().
  void place(Place place);
  /// The position of the batch that next() will return.
  Position position() const { return position_; }
  /// A number that grows with each batch that is taken from any loader: the last one of this loader, 0 before its first batch.
  uint64_t last_taken() const { return last_taken_; }
  /// Samples::weight of the batch that was taken last.
  double last_weight() const { return last_weight_; }
  /// The number of batches in this epoch; of a stream, and with `join`, only at_end() can know it.
  std::optional<int64_t> batches();
  /// Samples of one batch on all ranks together; 0 if batches differ.
  int64_t global_batch() const;
  /// What the order of samples depends on, in words.
  std::string order() const;

  /// Iterates over the rest of the epoch: for (auto& batch : loader)
  BatchIterator<Loader> begin() { return BatchIterator(*this); }
  std::default_sentinel_t end() { return {}; }

 private:
  struct Result {
    std::optional<Samples> batch = {};  // nothing at the end of an epoch
    std::vector<Share> shares = {};
    std::exception_ptr error = nullptr;
    bool is_placed = false;
  };
  struct Attempt {
    Drawn drawn = {};
    bool has_failed = false;  // what it makes is the error
  };

  bool is_remote() const { return options_.dispatch && !options_.dispatch->is_first(); }
  void expect_place(const Position& position);
  void restart(const Position& position);
  void work();
  void make_next(std::unique_lock<std::mutex>& lock);
  Attempt draw(const Position& position, std::unique_lock<std::mutex>& lock);
  static void put_at(Result& result, const Place& place, const Position& position);
  Samples first_of_epoch();
  Result make(const Position& position, const Drawn& drawn, const Place& place) const;
  void with_source(std::unique_lock<std::mutex>& lock, c10::function_ref<void()> act);
  std::optional<int64_t> count_batches(int64_t epoch);
  const Result& peek();
  Result take_own();
  Result receive();
  Result join();

  const std::unique_ptr<Source> source_;
  const LoaderOptions options_;
  Position position_;
  uint64_t last_taken_ = 0;
  double last_weight_ = 1;
  std::optional<Result> peeked_;
  std::optional<std::pair<int64_t, std::optional<int64_t>>> known_batches_;  // of an epoch
  bool has_run_out_ = false;                                                 // before others, in this epoch
  Samples spare_;                                                            // for when it has

  std::mutex mutex_;  // protects all members below
  std::condition_variable news_;
  bool is_drawing_ = false;  // a thread uses the source
  bool has_failed_ = false;  // the source, so that nothing more is drawn
  Position to_draw_;
  Place place_;
  int64_t begun_ = 0, delivered_ = 0;  // numbers of batches and ends of epochs, counted over all epochs
  std::map<int64_t, Result> ready_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace tessera::data
