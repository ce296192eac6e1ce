// Batches, fetched in the background and delivered in order.
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

#include "tessera/data/sampler.h"
#include "tessera/data/samples.h"

namespace tessera::data {

/// Makes a batch of the samples with these numbers. Called by several threads at once, without recording gradients.
using Fetch = std::function<Samples(std::span<const int64_t> numbers)>;

struct LoaderOptions {
  int workers = 2;      // threads; 0 fetches each batch when it is asked for
  int ahead = 4;        // batches that are fetched before they are asked for
  Position start = {};  // where to go on: an earlier loader's position()
};

class Loader {
 public:
  Loader(Sampler sampler, Fetch fetch, const LoaderOptions& options = {});
  Loader(Loader&&) = delete;
  ~Loader();  // ends the workers after the batch that they are at

  /// The next batch of the epoch, or nothing at its end; the call after that begins the next epoch. What fetch throws comes out here, with
  /// the batch's position before its message, as often as that batch is asked for.
  std::optional<Samples> next();

  /// Of the batch that next() delivers next.
  Position position() const { return position_; }
  /// Batches of an epoch.
  int64_t batches() const { return sampler_.batches(); }

  /// What is left of the epoch: for (auto& batch : loader)
  class Iterator {
   public:
    explicit Iterator(Loader& loader) : loader_(&loader), batch_(loader.next()) {}
    Samples& operator*() { return *batch_; }
    Iterator& operator++() {
      batch_ = loader_->next();
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return !batch_; }

   private:
    Loader* loader_;
    std::optional<Samples> batch_;
  };
  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() { return {}; }

 private:
  struct Result {
    Samples batch;
    std::exception_ptr error;
  };

  void work();
  Result make(const Position& position, const Part& part) const;
  Result take_result();

  Sampler sampler_;
  Fetch fetch_;
  LoaderOptions options_;
  Position position_;

  std::mutex mutex_;  // for all that follows, and for the sampler if there are workers
  std::condition_variable news_;
  Position to_fetch_;
  int64_t begun_ = 0, delivered_ = 0;  // batches, counted over all epochs
  std::map<int64_t, Result> ready_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace tessera::data
