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
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/data/sampler.h"
#include "tessera/data/samples.h"
#include "tessera/data/source.h"
#include "tessera/data/stream.h"

namespace tessera::data {

/// Makes a batch of the samples with these numbers. It is called by several threads at once, with gradients disabled.
using Fetch = std::function<Samples(std::span<const int64_t> numbers)>;
/// Makes a batch with random augmentation. seeds[i] is the seed of sample i, and differs in every epoch. If a program draws all random
/// numbers of sample i from seeds[i], a run has the same batches with any number of ranks and workers, and after a resume.
using SeededFetch = std::function<Samples(std::span<const int64_t> numbers, std::span<const uint64_t> seeds)>;

/// Places a tensor of a batch, such as on a device.
using Place = std::function<at::Tensor(const at::Tensor& rows)>;

struct LoaderOptions {
  int workers = 2;      // threads; with 0, next() fetches each batch itself
  int ahead = 4;        // how many batches are fetched in advance
  Position start = {};  // where to resume: the position() of an earlier loader
  /// The target given to samples that only fill a batch, such as the ignore_index of the loss, which then does not count them on any rank;
  /// 0 where targets are floats {n, classes}, the shares of classes.
  std::optional<int64_t> target_of_repeats = {};
  /// Rank 0 of this group fetches whole batches, and sends each rank its part, as with dispatch_batches of Accelerate: for data that only
  /// one rank can read. next() is collective then, and the other ranks fetch nothing. All ranks pass the same source, which divides batches
  /// among the ranks of the group.
  std::optional<Communicator> dispatch = {};
  /// Each rank of this group has its own source, made for one rank. Sources may differ in length: a rank whose source has ended gets an
  /// earlier batch again, with weight 0, until the sources of all ranks have ended, as with PyTorch's Join. next() is collective then.
  std::optional<Communicator> join = {};
  /// Identifies the data, for example fingerprint(samples): a run refuses to resume with other data, even if the number of samples is the
  /// same.
  std::string data = {};
};

/// Points to the number of a loop over a loader. The loop is open as long as a copy of this pointer exists: BatchIterator keeps one until
/// the loop ends or is left.
using Loop = std::shared_ptr<const uint64_t>;

/// Iterates over a source of batches: for (auto& batch : loader). The source has next(), which returns nothing at the end, and loop(),
/// which opens a loop over its loader.
template <class Source>
class BatchIterator {
 public:
  explicit BatchIterator(Source& source) : source_(&source), loop_(source.loop()), batch_(source.next()) {}
  Samples& operator*() { return *batch_; }
  BatchIterator& operator++() {
    batch_ = source_->next();
    return *this;
  }
  bool operator==(std::default_sentinel_t) const { return !batch_; }

 private:
  Source* source_;
  Loop loop_;
  std::optional<Samples> batch_;
};

/// The batch that was taken last from a loader, until the end of its epoch.
struct Taken {
  uint64_t number = 0;  // grows with each batch that is taken from any loader, and with each loop that is opened; 0 if there is no batch
  double weight = 1;    // Samples::weight
  uint64_t loop = 0;    // the number of the loop in which it was taken; 0 outside of a loop
};

class Loader {
 public:
  Loader(Sampler sampler, Fetch fetch, const LoaderOptions& options = {});
  Loader(Sampler sampler, SeededFetch fetch, const LoaderOptions& options = {});
  explicit Loader(Stream stream, const LoaderOptions& options = {});
  explicit Loader(std::unique_ptr<Source> source, const LoaderOptions& options = {});
  Loader(Loader&&) = delete;
  ~Loader();  // waits until the workers have finished their present batches, and logs every ten seconds what it waits for

  /// The next batch of the epoch, or nothing at its end; the call after that begins the next epoch. If fetch throws, next() throws the same
  /// exception with the position in front of its message. It then stays at that batch, so another call throws again.
  std::optional<Samples> next();
  /// Whether the batch that was taken last ends the epoch. Waits for the next batch if the number of batches is unknown. Collective if
  /// next() is.
  bool at_end();

  /// Goes to another position, before the first batch or in the middle of an epoch. Throws UsageError if an epoch has no such position. May
  /// open a stream again, to read it from its beginning. `taken`: the earlier taken(), if the caller returns to a position that it has left
  /// for a while.
  void seek(const Position& position, const Taken& taken = {});
  /// Translates a position that counts batches of `global_batch` samples into a position of this loader with the same samples left in the
  /// epoch. Throws UsageError if no batch of this loader can begin there.
  Position place_of(const Position& position, int64_t global_batch);
  /// From the next batch on, the worker that has fetched a batch calls `place` for its tensors. Call this between two calls of next().
  void place(Place place);
  /// The position of the batch that next() will return.
  Position position() const { return position_; }
  /// The batch that was taken last. A Trainer weights a loss by it.
  const Taken& taken() const { return taken_; }
  /// The number of the newest batch or loop of all loaders.
  static uint64_t newest();
  /// Opens a loop: `for` does so by begin().
  Loop loop();
  /// The number of the innermost open loop over this loader; 0 if none is open.
  uint64_t open_loop() const;
  /// The number of batches in this epoch after its first position().first samples; nothing if it is unknown before the end, as for a stream
  /// or with `join`.
  std::optional<int64_t> batches();
  /// The number of batches in a whole epoch.
  std::optional<int64_t> batches_of_epoch(int64_t epoch);
  /// Samples of one batch on all ranks together; 0 if batches differ.
  int64_t global_batch() const;
  /// Says in words what the order of samples depends on.
  std::string order() const;
  /// LoaderOptions::data.
  const std::string& data() const { return options_.data; }

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
    std::exception_ptr error = nullptr;
  };

  bool is_remote() const { return options_.dispatch && !options_.dispatch->is_first(); }
  void expect_place(const Position& position);
  void restart(const Position& position);
  void work();
  void make_next(std::unique_lock<std::mutex>& lock);
  Attempt draw(const Position& position, std::unique_lock<std::mutex>& lock);
  static void put_at(Result& result, const Place& place, const Position& position);
  Samples first_of_epoch();
  Result make(const Position& position, const Attempt& attempt, const Place& place) const;
  void with_source(std::unique_lock<std::mutex>& lock, c10::function_ref<void()> act);
  std::optional<int64_t> count_batches(const Position& position);
  const Result& peek();
  Result take_own();
  Result receive();
  Result join();

  const std::unique_ptr<Source> source_;
  const LoaderOptions options_;
  Position position_;
  Taken taken_;
  std::vector<std::weak_ptr<const uint64_t>> loops_;
  std::optional<Result> peeked_;
  std::optional<std::pair<Position, std::optional<int64_t>>>
      known_batches_;         // cached by batches(): the begin of the epoch (with Position::first), and the number of its batches
  bool has_run_out_ = false;  // with `join`: whether the source of this rank has ended its epoch
  Samples spare_;             // with `join`: the batch that this rank repeats after the end of its source

  std::mutex mutex_;  // protects all members below
  std::condition_variable news_;
  bool is_drawing_ = false;  // whether a thread uses the source
  bool has_failed_ = false;  // whether the source has failed, so that nothing more is drawn
  Position to_draw_;
  Place place_;
  int64_t begun_ = 0, delivered_ = 0;  // how many batches and ends of epochs were begun and delivered, over all epochs
  std::map<int64_t, Result> ready_;
  bool stopping_ = false;
  int working_ = 0;  // threads that have not ended
  std::vector<std::thread> workers_;
};

}  // namespace tessera::data
