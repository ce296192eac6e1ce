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
  /// Makes the samples of all local ranks, one rank after the other. A Loader calls it once, in any thread. Empty at the end of the epoch.
  std::function<Samples()> make = {};
  std::vector<Share> shares = {};       // one for each local rank
  std::optional<int64_t> batches = {};  // at the end of the epoch: its number of batches, if known; a start after them is an error
};

/// Gives a Loader its batches. Stream is a source, and a Loader wraps a Sampler in one; a program may write its own. One thread at a time
/// draws from it or counts its batches.
class Source {
 public:
  virtual ~Source() = default;

  /// Draws this process's part of the batch at a position. Usually positions follow each other, but a Loader may go to any position.
  virtual Drawn draw(const Position& position) = 0;
  /// The number of batches in an epoch; nothing if it is unknown before the end of the epoch.
  virtual std::optional<int64_t> batches(int64_t epoch) = 0;
  /// The number of batches that an epoch has after its first samples (Position::first). Throws UsageError if the source can't begin there.
  virtual std::optional<int64_t> batches_behind(int64_t /*first*/, int64_t /*epoch*/) {
    throw UsageError(
        "this source can't resume after samples that came in batches of another size; keep the batch size, or override batches_behind()");
  }
  /// Makes a draw() that is blocked return soon, with any result. Another thread calls it when the Loader is destroyed.
  virtual void interrupt() {}
  /// Samples of one step on all ranks together; 0 if batches differ.
  virtual int64_t global_batch() const = 0;
  /// Among how many ranks a batch is divided.
  virtual int ranks() const = 0;
  /// Describes everything but the position that the order of samples depends on.
  virtual std::string order() const = 0;
  /// Makes the source draw the parts of all ranks from now on, and not of this process only.
  virtual void take_all_ranks() = 0;
};

}  // namespace tessera::data
