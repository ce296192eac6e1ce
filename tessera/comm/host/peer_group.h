// The ranks that share memory: who is there, who has died, whether one has given up, and how they wait for each other. They may be threads
// or processes: the protocol is the same, so what the thread sanitizer says about threads holds for processes.
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

/// What a wait does when all ranks wait for each other.
enum class Deadlock {
  Throw,
  GiveWay,  // ends without what it waited for, if all ranks can do so; else like Throw
  WaitOn,   // others throw, and may come to what this one waits for
};

/// What there is to know of a wait that lasts.
struct WaitOptions {
  Deadlock deadlock = Deadlock::Throw;
  c10::function_ref<std::string()> what;           // in words
  c10::function_ref<bool()> is_program = nullptr;  // if it may be only a thread that works for it
};

/// How far one rank has come with something: written by that rank, waited for by the others. Lies in shared memory; begins as zeros.
struct alignas(64) Counter {
  std::atomic<uint32_t> value;     // may wrap
  std::atomic<uint32_t> sleepers;  // ranks asleep until it changes
};

class PeerGroup {
 public:
  /// What it takes at the beginning of the block; `payload()` is for its owner.
  static size_t header_bytes(int ranks);

  PeerGroup(SharedBlock block, int rank, int ranks);
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;
  ~PeerGroup();

  int rank() const { return rank_; }
  int size() const { return ranks_; }
  const SharedBlock& block() const { return block_; }
  std::byte* payload() const { return block_.data() + header_bytes(ranks_); }

  /// This rank has come to `value`; all that it wrote before is seen by those who wait for that.
  void raise(Counter& own, uint32_t value) const;
  /// Waits until all have come to `value`, each with a counter of its own. Any thread may call it. Throws LinkFailure. False if it gave
  /// way.
  bool wait(std::span<Counter> counters, uint32_t value, Clock::time_point deadline, const WaitOptions& waiting);
  /// What each rank waits for, when all wait for each other.
  std::string waits_of_all() const;
  /// A thread of the program uses the group. Where several do, one may wait while another works, so nobody can tell a deadlock.
  void used_by_this_thread();
  Callers callers() const { return threads_.callers(); }
  /// Who says whether something runs beside the program that others may wait for.
  void ask(std::function<bool()> works_aside) { works_aside_ = std::move(works_aside); }
  static bool has_come(const Counter& counter, uint32_t value) {
    return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - value) >= 0;
  }

  /// Ranks have given up a wait for each other, so that what they do next may not fit together: until all are in step again.
  void fall_out_of_step() const;
  void back_in_step() const;
  bool in_step() const;

  void abort(std::string_view reason, int culprit) noexcept;
  void expect_running() const;  // throws LinkFailure if somebody has aborted

 private:
  struct Header;
  struct Peer;

  Header& header() const;
  Peer& peer(int rank) const;
  void check_peers(std::span<Counter> counters, uint32_t value, Clock::time_point deadline);
  /// A wait that lasts, as the other ranks see it.
  struct PostedWait;
  /// Whether all ranks wait and none will come on. Each confirms, while it is awake, that it waits in vain as long as the others do; what
  /// all have confirmed is true.
  bool deadlocked(const Counter& counter, uint32_t value, PostedWait& wait);
  /// How, if it is. A rank that has come to `value` may leave, but it must not die.
  std::optional<std::string> gone(int rank, const Counter& counter, uint32_t value);

  SharedBlock block_;
  int rank_;
  int ranks_;
  CallerThreads threads_;  // of the program
  std::function<bool()> works_aside_;
  std::atomic<uint32_t> last_ticket_ = 0;
  std::mutex mutex_;
  std::vector<Fd> pid_fds_;  // pid descriptors of ranks in other processes, for noticing their death
};

}  // namespace tessera
