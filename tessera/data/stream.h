// Stream: samples that come one after the other, from a file that is read from its beginning, a socket or a simulation.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/source.h"

namespace tessera::data {

/// Returns the next samples of the stream, any number of them, such as one record or a chunk of a file; nothing at the end.
using Pull = std::function<std::optional<Samples>()>;

struct StreamOptions {
  /// Begins an epoch. If a run resumes in the middle of an epoch, the samples before that position are pulled and dropped; each evaluation
  /// opens the stream again. A Loader waits for a pull that has begun, even when it is destroyed.
  std::function<Pull(int64_t epoch)> open = {};
  /// Makes a blocked pull return, for example by shutdown() of its socket. Another thread calls it if the Loader is destroyed during a
  /// pull. Without it, the destructor of the Loader waits for a pull that never returns, and logs that every ten seconds.
  std::function<void()> interrupt = {};
  int64_t global_batch = 0;            // samples of one step on all ranks together; each rank pulls all of them, and keeps its part
  std::vector<int> local_ranks = {0};  // the ranks whose samples this process takes, ascending: Communicator::local_ranks()
  int ranks = 1;
  Tail tail = Tail::Drop;
  uint64_t seed = 0;
  /// Transforms this rank's part of a batch, in several threads at once: decodes, tokenizes, or augments by seeds, as SeededFetch does.
  std::function<Samples(Samples samples, std::span<const uint64_t> seeds)> transform = {};
  std::string name = "a stream";  // a run resumes only with a stream of the same name
};

class Stream : public Source {
 public:
  explicit Stream(StreamOptions options);

  Drawn draw(const Position& position) override;
  std::optional<int64_t> batches(int64_t /*epoch*/) override { return std::nullopt; }
  std::optional<int64_t> batches_behind(int64_t /*first*/, int64_t /*epoch*/) override { return std::nullopt; }
  void interrupt() override {
    if (options_.interrupt) options_.interrupt();
  }
  int64_t global_batch() const override { return division_.global_batch(); }
  int ranks() const override { return division_.ranks(); }
  std::string order() const override;
  void take_all_ranks() override { division_.take_all_ranks(); }

 private:
  void go_to(const Position& position);
  void begin(int64_t epoch, int64_t first);
  void expect_rows(const Samples& pulled);
  /// Pulls until waiting_ has a global batch, or the stream ends. Returns how many samples of that batch there are.
  int64_t fill();
  void drop(int64_t count);
  void drop_rows(int64_t count);
  Samples rows(int64_t first, int64_t count) const;

  StreamOptions options_;
  Division division_;
  Pull pull_;
  std::optional<Position> next_;  // the position of the first batch in waiting_
  std::deque<Samples> waiting_;
  int64_t are_waiting_ = 0;
  Samples first_;  // the first samples of the epoch, for Tail::Fill
  bool has_ended_ = false;
  std::optional<bool> has_targets_;  // whether the samples of this epoch have targets
};

}  // namespace tessera::data
