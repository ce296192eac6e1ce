// Source: the interface from which a Loader gets its batches.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/data/position.h"
#include "tessera/data/samples.h"
#include "tessera/data/share.h"

namespace tessera::data {

/// This process's part of a batch.
struct Drawn {
  /// Makes the samples: those of each local rank, one rank after the other. Called by any thread, once. Empty where the epoch has ended.
  std::function<Samples()> make = {};
  std::vector<Share> shares = {};       // of its local ranks, one each
  std::optional<int64_t> batches = {};  // of the epoch that has ended, if it knows: a start behind them is an error
};

/// Sampler and Stream are such sources; a program may have one of its own. One thread at a time calls its functions.
class Source {
 public:
  virtual ~Source() = default;

  /// Mostly the positions come one after the other, but a Loader may go to any.
  virtual Drawn draw(const Position& position) = 0;
  /// The number of batches in an epoch; nothing if only its end can tell.
  virtual std::optional<int64_t> batches(int64_t epoch) = 0;
  /// The number of batches that an epoch has behind its first samples (Position::first). Throws UsageError for a source that can't begin
  /// there.
  virtual std::optional<int64_t> batches_behind(int64_t /*first*/, int64_t /*epoch*/) {
    throw UsageError(
        "this source of batches can't begin behind samples that came in batches of another size; it overrides batches_behind() if it can");
  }
  /// Makes a draw that waits for others return soon, with any result. Another thread calls it when the Loader is destroyed.
  virtual void interrupt() {}
  /// Samples of one step on all ranks together; 0 if batches differ.
  virtual int64_t global_batch() const = 0;
  /// Among how many ranks a batch is divided.
  virtual int ranks() const = 0;
  /// Says in words what the order of samples depends on, beside the position.
  virtual std::string order() const = 0;
  /// From now on the source draws the parts of all ranks, and not of this process only.
  virtual void take_all_ranks() = 0;
};

}  // namespace tessera::data
