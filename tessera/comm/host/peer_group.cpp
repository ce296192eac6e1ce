#include "tessera/comm/host/peer_group.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>

#include "tessera/comm/host/fixed_text.h"

namespace tessera {
namespace {

// How often a waiting rank checks that the other ranks are alive, and that there is no deadlock.
constexpr auto kCheckInterval = std::chrono::milliseconds(50);
// About ten microseconds, as long as falling asleep and waking up would take.
constexpr int kSpins = 2000;

/// Returns when the word is no longer `seen`, after a wake, or after `most`. It may also return early, so the caller must check the word.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds most) {
  const timespec span{.tv_sec = static_cast<time_t>(most.count() / 1'000'000'000),
                      .tv_nsec = static_cast<long>(most.count() % 1'000'000'000)};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &span, nullptr, 0);
}

/// Lets the other hardware thread of the core run.
void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

struct alignas(64) PeerGroup::Header {
  enum State : uint32_t { Running, Aborting, Aborted };
  std::atomic<uint32_t> state;
  std::atomic<uint32_t> out_of_step;
  std::atomic<uint64_t> deadlock;  // hash of the last set of waits that all ranks have confirmed
  int32_t culprit;                 // world rank that caused the abort
  FixedText<1004> reason;
};

struct alignas(64) PeerGroup::Peer {
  std::atomic<uint32_t> left;  // the rank has left the group
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> several;    // several threads of the rank's program use the group
  std::atomic<uint32_t> ticket;     // number of the rank's posted wait; 0 if there is none
  std::atomic<uint32_t> yields;     // the posted wait can yield
  std::atomic<uint64_t> confirmed;  // hash of all ranks' tickets that the rank has confirmed; odd if all waits can yield
  FixedText<228> waits_for;
};

size_t PeerGroup::header_bytes(int ranks) {
  return sizeof(Header) + ranks * sizeof(Peer);
}

PeerGroup::PeerGroup(SharedBlock block, int rank, std::vector<int> world_ranks)
    : block_(std::move(block)), rank_(rank), world_ranks_(std::move(world_ranks)), pid_fds_(world_ranks_.size()) {
  peer(rank_).pid = ::getpid();
}

PeerGroup::~PeerGroup() {
  peer(rank_).left = 1;
}

PeerGroup::Header& PeerGroup::header() const {
  return *reinterpret_cast<Header*>(block_.data());
}

PeerGroup::Peer& PeerGroup::peer(int rank) const {
  return reinterpret_cast<Peer*>(block_.data() + sizeof(Header))[rank];
}

void PeerGroup::raise(Counter& own, uint32_t value) const {
  own.value.store(value);
  if (own.sleepers > 0) ::syscall(SYS_futex, &own.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void PeerGroup::used_by_this_thread() {
  threads_.note();
  if (threads_.callers() == Callers::SeveralThreads) peer(rank_).several = 1;
}

struct PeerGroup::PostedWait {
  Peer& record;
  const WaitOptions& waiting;
  bool posted = false, told = false;

  ~PostedWait() {
    if (posted) record.ticket = 0;
  }
};

bool PeerGroup::deadlocked(const Counter& counter, uint32_t value, PostedWait& wait) {
  auto& own = wait.record;
  if (!wait.posted) {
    if (wait.waiting.is_program && !wait.waiting.is_program()) return false;
    own.confirmed = 0;
    own.yields = wait.waiting.deadlock == Deadlock::Yield ? 1 : 0;
    own.ticket = ++last_ticket_;
    wait.posted = true;
  }
  // The other ranks may have found the deadlock, and ended their waits, before this rank looked.
  if (own.confirmed != 0 && own.confirmed == header().deadlock) {
    wait.posted = wait.waiting.deadlock != Deadlock::WaitOn;  // a wait that continues is posted again: it may become part of another deadlock
    return true;
  }
  // Another rank may wait for work that this rank does outside of the program's threads.
  if (wait.waiting.deadlock != Deadlock::WaitOn && works_aside_ && works_aside_()) return false;
  uint64_t hash = 1;
  bool all_yield = true;
  for (int r = 0; r < size(); r++) {
    if (peer(r).ticket == 0 || peer(r).several != 0) return false;
    hash = (hash ^ peer(r).ticket) * 0x9e3779b97f4a7c15ULL;
    all_yield &= peer(r).yields != 0;
  }
  hash = hash << 1 | static_cast<uint64_t>(all_yield);
  // Must come after the tickets are read: a rank may have raised the counter that this rank waits for just before it began to wait itself,
  // and then there is no deadlock.
  if (has_come(counter, value)) return false;
  // `waits_for` is not written while the ranks are out of step, so that ranks which learn of a deadlock late still read what all ranks
  // waited for in it.
  if (!wait.told && in_step()) {
    wait.told = true;
    own.waits_for.assign_prefix(wait.waiting.what());
  }
  own.confirmed = hash;
  for (int r = 0; r < size(); r++) {
    if (peer(r).confirmed != hash) return false;
  }
  header().deadlock = hash;
  return true;
}

std::string PeerGroup::waits_of_all() const {
  std::string result;
  for (int r = 0; r < size(); r++) result += fmt::format("{}rank {}: {}", r == 0 ? "" : "; ", world_ranks_[r], peer(r).waits_for.view());
  return result;
}

bool PeerGroup::wait(std::span<Counter> counters, uint32_t value, Clock::time_point deadline, const WaitOptions& waiting) {
  PostedWait wait{.record = peer(rank_), .waiting = waiting};
  for (auto& counter : counters) {
    bool asleep = false;
    for (int spin = 0; spin < kSpins && !has_come(counter, value); spin++) pause();
    while (!has_come(counter, value)) {
      // Looks for a deadlock only after a first sleep. This comes before check_peers(), because ranks that already got the error of a
      // deadlock may be gone.
      if (asleep && deadlocked(counter, value, wait) && waiting.deadlock != Deadlock::WaitOn) {
        if (peer(rank_).confirmed % 2 == 1) return false;
        throw LinkFailure{.kind = LinkFailure::Kind::Deadlocked};
      }
      check_peers(counters, value, deadline);
      const uint32_t seen = counter.value;
      if (has_come(counter, value)) break;
      const auto left = std::max(Clock::duration::zero(), deadline - Clock::now());
      counter.sleepers++;
      futex_wait(counter.value, seen, std::min<std::chrono::nanoseconds>(left, kCheckInterval));
      counter.sleepers--;
      asleep = true;
    }
  }
  return true;
}

void PeerGroup::check_peers(std::span<Counter> counters, uint32_t value, Clock::time_point deadline) {
  expect_running();
  const bool late = Clock::now() >= deadline;
  std::vector<int> missing;
  for (int r = 0; r < size(); r++) {
    if (const auto how = gone(r, counters[r], value)) {
      throw LinkFailure{.kind = LinkFailure::Kind::Gone, .ranks = {world_ranks_[r]}, .reason = *how};
    }
    if (late && !has_come(counters[r], value)) missing.push_back(world_ranks_[r]);
  }
  if (!missing.empty()) {
    throw LinkFailure{.kind = LinkFailure::Kind::Late, .ranks = std::move(missing)};
  }
}

void PeerGroup::fall_out_of_step() const {
  header().out_of_step = 1;
}

void PeerGroup::back_in_step() const {
  header().out_of_step = 0;
}

bool PeerGroup::in_step() const {
  return header().out_of_step == 0;
}

void PeerGroup::abort(std::string_view reason, int culprit) noexcept {
  uint32_t running = Header::Running;
  if (!header().state.compare_exchange_strong(running, Header::Aborting)) return;
  header().reason.assign_prefix(reason);
  header().culprit = culprit;
  header().state = Header::Aborted;
}

void PeerGroup::expect_running() const {
  if (header().state != Header::Aborted) return;
  throw LinkFailure{.kind = LinkFailure::Kind::Aborted, .reason = std::string(header().reason.view()), .culprit = header().culprit};
}

std::optional<std::string> PeerGroup::gone(int rank, const Counter& counter, uint32_t value) {
  // `left` is read before the counter, because the rank may raise the counter and leave in between.
  if (peer(rank).left != 0) return has_come(counter, value) ? std::nullopt : std::optional<std::string>("has left the group");
  const pid_t pid = peer(rank).pid;
  if (pid == 0 || pid == ::getpid()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  auto& peer = pid_fds_[rank];
  if (!peer) peer = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  pollfd watched{.fd = peer.get(), .events = POLLIN, .revents = 0};
  // Without pid descriptors (an old kernel, a sandbox), kill() tells whether the pid exists.
  const bool dead = peer ? ::poll(&watched, 1, 0) > 0 : ::kill(pid, 0) != 0 && errno == ESRCH;
  if (dead) return fmt::format("(process {}) has died", pid);
  return std::nullopt;
}

}  // namespace tessera
