// Memory that all ranks of a group see, and counters by which they tell each other how far they are with it.
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
#include "tessera/comm/transport.h"

namespace tessera {

class PeerGroup;
enum class Deadlock;
class SharedBlock;
struct Counter;
struct LinkFailure;

/// A part for each rank, one after the other in rank order. Zeros at first; each rank itself is the first to touch its part.
class SharedArea {
 public:
  static size_t block_size(const AreaShape& shape, int ranks);
  /// Makes sure that the memory of this rank's part is there. Throws IoError where there is not enough.
  static void commit(const SharedBlock& block, const AreaShape& shape, int rank, int ranks);

  SharedArea(const SharedBlock& block, const AreaShape& shape, std::shared_ptr<PeerGroup> peers);

  int rank() const;
  int size() const;
  std::byte* part(int rank) const { return data_.get() + static_cast<size_t>(rank) * shape_.bytes_per_rank; }
  /// All parts. Whoever keeps the pointer keeps the memory.
  const std::shared_ptr<std::byte>& data() const { return data_; }

  /// This rank has come to `value` of a counter, and all that it wrote before is there for those who wait for that. Values wrap.
  void reach(int counter, uint32_t value) const;
  bool reached_by_all(int counter, uint32_t value) const;
  /// Until all ranks have come to it. From any thread. `what` says in the error what for. An error here ends the whole group, but for
  /// DeadlockError, which comes where all ranks wait for each other: after that they have to come back in step.
  void wait(int counter, uint32_t value, std::chrono::milliseconds limit, c10::function_ref<std::string()> what) const;
  /// The same, but false, without an error, where all ranks wait for each other by this very function: then all may give way.
  bool wait_or_give_way(int counter, uint32_t value, std::chrono::milliseconds limit, c10::function_ref<std::string()> what) const;

  /// Throws CommError once a DeadlockError has come to any rank of the group, until back_in_step().
  void expect_in_step() const;
  void back_in_step() const;

  /// Whether several threads of this rank's program use it.
  Callers callers() const;

  /// Who else has to hear of an error that ends the group.
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
