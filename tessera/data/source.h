// Source: where the batches of a Loader come from.
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

/// What this process gets of a batch.
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
  /// The number of batches in an epoch, unless only its end will show.
  virtual std::optional<int64_t> batches(int64_t epoch) = 0;
  /// The same for what an epoch has behind its first samples (Position::first). Throws UsageError for a source that can't begin there.
  virtual std::optional<int64_t> batches_behind(int64_t /*first*/, int64_t /*epoch*/) {
    throw UsageError(
        "this source of batches can't begin behind samples that came in batches of another size; it overrides batches_behind() if it can");
  }
  /// Makes a draw that waits for others return soon, whatever it returns. Another thread calls it when the Loader goes.
  virtual void interrupt() {}
  /// Samples of one step on all ranks together; 0 if batches differ.
  virtual int64_t global_batch() const = 0;
  /// Among how many ranks a batch is divided.
  virtual int ranks() const = 0;
  /// What the order of samples depends on, beside the position, in words.
  virtual std::string order() const = 0;
  /// From now on it draws the parts of all ranks, and not of this process only.
  virtual void take_all_ranks() = 0;
};

}  // namespace tessera::data
