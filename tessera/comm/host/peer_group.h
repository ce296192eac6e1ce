// PeerGroup: the ranks that share memory. It knows which of them are alive, have died or have aborted, and lets them wait for each other.
// Threads and processes use the same protocol, so what the thread sanitizer shows for threads also holds for processes.
#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/fd.h"
#include "tessera/comm/host/caller_threads.h"
#include "tessera/comm/host/link.h"
#include "tessera/comm/host/shared_block.h"

namespace tessera {

/// How a wait ends when all ranks wait for each other.
enum class Deadlock {
  Throw,
  Yield,   // returns early if all ranks wait with Yield; otherwise like Throw
  WaitOn,  // continues to wait, because the ranks that throw may then raise the counters that this wait needs
};

/// Describes a wait to the search for deadlocks.
struct WaitOptions {
  Deadlock deadlock = Deadlock::Throw;
  c10::function_ref<std::string()> what;           // description for error messages
  c10::function_ref<bool()> is_program = nullptr;  // whether the program itself waits, and not only a worker thread; unset if always
};

/// How far one rank has come. That rank writes it, and the other ranks wait for it. Lies in shared memory, and is zero at first.
struct alignas(64) Counter {
  std::atomic<uint32_t> value;     // may wrap around
  std::atomic<uint32_t> sleepers;  // how many ranks sleep until the value changes
};

class PeerGroup {
 public:
  /// The size of the group's own data at the beginning of the block. The rest, payload(), belongs to the block's owner.
  static size_t header_bytes(int ranks);

  /// `world_ranks`: for each rank of the group, the number by which errors name it.
  PeerGroup(SharedBlock block, int rank, std::vector<int> world_ranks);
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;
  ~PeerGroup();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  const SharedBlock& block() const { return block_; }
  std::byte* payload() const { return block_.data() + header_bytes(size()); }

  /// Sets this rank's counter to `value` and wakes the ranks that wait for it. They also see everything that this rank wrote before.
  void raise(Counter& own, uint32_t value) const;
  /// Waits until all ranks' counters, one per rank, have reached `value`. Any thread may call it. Throws LinkFailure. Returns false if it
  /// yielded in a deadlock.
  bool wait(std::span<Counter> counters, uint32_t value, Clock::time_point deadline, const WaitOptions& waiting);
  /// Says for an error what each rank waits for. Valid only after a deadlock.
  std::string waits_of_all() const;
  /// Records that the calling thread of the program uses the group. With several threads deadlocks are not detected, because one thread may
  /// wait while another works.
  void used_by_this_thread();
  Callers callers() const { return threads_.callers(); }
  /// Sets a function that tells whether this rank has work under way outside of the program's threads. Other ranks may wait for that work.
  void ask(std::function<bool()> works_aside) { works_aside_ = std::move(works_aside); }
  static bool has_come(const Counter& counter, uint32_t value) {
    return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - value) >= 0;
  }

  /// After a deadlock error the ranks may be at different places of the program, until all have called back_in_step(). Shared by all ranks.
  void fall_out_of_step() const;
  void back_in_step() const;
  bool in_step() const;

  /// See Link::abort().
  void abort(std::string_view reason, int culprit) noexcept;
  void expect_running() const;  // throws LinkFailure if a rank has aborted

 private:
  struct Header;
  struct Peer;

  Header& header() const;
  Peer& peer(int rank) const;
  void check_peers(std::span<Counter> counters, uint32_t value, Clock::time_point deadline);
  /// A wait that has lasted a while and is visible to the other ranks.
  struct PostedWait;
  /// Whether all ranks wait for each other. Each rank, while it is awake, confirms the set of waits that it sees if it still has not
  /// received what it waits for. A set that all ranks have confirmed is a deadlock, since no waiting rank can end another's wait.
  bool deadlocked(const Counter& counter, uint32_t value, PostedWait& wait);
  /// Says how a rank is known to be gone; nothing if it is not gone. A rank whose counter has reached `value` may leave, but must not die.
  std::optional<std::string> gone(int rank, const Counter& counter, uint32_t value);

  SharedBlock block_;
  int rank_;
  const std::vector<int> world_ranks_;
  CallerThreads threads_;  // the program's threads that use the group
  std::function<bool()> works_aside_;
  std::atomic<uint32_t> last_ticket_ = 0;
  std::mutex mutex_;
  std::vector<Fd> pid_fds_;  // pid descriptors of ranks in other processes, for noticing their death
};

}  // namespace tessera
