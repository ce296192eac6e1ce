// Memory that all ranks of a group see, with counters by which the ranks tell each other how far they have come.
#pragma once

#include <c10/util/FunctionRef.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "tessera/comm/host/caller_threads.h"
#include "tessera/comm/operation.h"

namespace tessera {

class PeerGroup;
enum class Deadlock;
class SharedBlock;
struct Counter;
struct LinkFailure;

/// One part for each rank, in rank order. All zeros at first; each rank is the first to touch its own part.
class SharedArea {
 public:
  static size_t block_size(const AreaShape& shape, int ranks);
  /// Allocates the memory of this rank's part and, on rank 0, of the counters. Throws IoError if there is not enough.
  static void commit(const SharedBlock& block, const AreaShape& shape, int rank, int ranks);

  SharedArea(const SharedBlock& block, const AreaShape& shape, std::shared_ptr<PeerGroup> peers);

  int rank() const;
  int size() const;
  std::byte* part(int rank) const { return data_.get() + rank * shape_.bytes_per_rank; }
  /// All parts. The pointer keeps the memory alive.
  const std::shared_ptr<std::byte>& data() const { return data_; }

  /// Sets this rank's value of a counter. Ranks that wait for it also see everything that this rank wrote before. Values wrap around.
  void reach(int counter, uint32_t value) const;
  bool reached_by_all(int counter, uint32_t value) const;
  /// Waits until the counter of every rank has reached `value`. Any thread may call it. `what` describes the wait for error messages.
  /// Throws DeadlockError if all ranks wait for each other; after that, the ranks must call back_in_step(). Any other error ends the whole
  /// group.
  void wait(int counter, uint32_t value, std::chrono::milliseconds limit, c10::function_ref<std::string()> what) const;
  /// Like wait(), but if all ranks wait for each other in this function, it returns false on all of them instead of throwing.
  bool wait_or_yield(int counter, uint32_t value, std::chrono::milliseconds limit, c10::function_ref<std::string()> what) const;

  /// Throws CommError if a rank of the group has got a DeadlockError since the last back_in_step().
  void expect_in_step() const;
  void back_in_step() const;

  /// Whether several threads of this rank's program use the group.
  Callers callers() const;

  /// Sets a function that wait() calls, with the message, before it throws an error that ends the group.
  using Tell = std::function<void(const LinkFailure& failure, std::string_view message)>;
  void when_broken(Tell tell) { tell_ = std::move(tell); }

 private:
  bool wait_as(Deadlock deadlock, int counter, uint32_t value, std::chrono::milliseconds limit,
               c10::function_ref<std::string()> what) const;
  std::span<Counter> counters(int which) const;

  std::shared_ptr<std::byte> data_;
  AreaShape shape_;
  std::shared_ptr<PeerGroup> peers_;
  Tell tell_;
};

}  // namespace tessera
