#include "tessera/comm/shm/company.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "tessera/comm/shm/futex.h"

namespace tessera {
namespace {

constexpr auto kLookAround = std::chrono::milliseconds(50);  // how often a waiting rank checks that the others are alive
constexpr int kSpins = 2000;                                 // some ten microseconds: about what falling asleep and waking up would take

/// Lets the other thread of the core work.
void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

struct alignas(64) Company::Header {
  enum State : uint32_t { Running, Aborting, Aborted };
  std::atomic<uint32_t> state;
  std::array<char, 1020> reason;  // ends with a zero
};

struct alignas(64) Company::Seat {
  std::atomic<uint32_t> left;  // it has gone, as planned
  std::atomic<int32_t> pid;
};

size_t Company::room(int ranks) {
  return sizeof(Header) + static_cast<size_t>(ranks) * sizeof(Seat);
}

Company::Company(SharedBlock block, int rank, int ranks)
    : block_(std::move(block)), rank_(rank), ranks_(ranks), peers_(static_cast<size_t>(ranks)) {
  seat(rank_).pid = ::getpid();
}

Company::~Company() {
  seat(rank_).left = 1;
}

Company::Header& Company::header() const {
  return *reinterpret_cast<Header*>(block_.data());
}

Company::Seat& Company::seat(int rank) const {
  return reinterpret_cast<Seat*>(block_.data() + sizeof(Header))[rank];
}

void Company::raise(Counter& own, uint32_t value) const {
  own.value.store(value);
  if (own.sleepers > 0) futex_wake_all(own.value);
}

void Company::wait(std::span<Counter> counters, uint32_t value, Clock::time_point deadline) {
  for (auto& counter : counters) {
    for (int spin = 0; spin < kSpins && !has_come(counter, value); spin++) pause();
    while (!has_come(counter, value)) {
      look_around(counters, value, deadline);
      const uint32_t seen = counter.value;
      if (has_come(counter, value)) break;
      const auto left = std::max(Clock::duration::zero(), deadline - Clock::now());
      counter.sleepers++;
      futex_wait(counter.value, seen, std::min<std::chrono::nanoseconds>(left, kLookAround));
      counter.sleepers--;
    }
  }
}

void Company::look_around(std::span<Counter> counters, uint32_t value, Clock::time_point deadline) {
  expect_running();
  const bool late = Clock::now() >= deadline;
  std::vector<int> missing;
  for (int r = 0; r < ranks_; r++) {
    if (const auto how = gone(r, counters[r], value)) {
      throw LinkFailure{.kind = LinkFailure::Kind::Gone, .ranks = {r}, .reason = *how};
    }
    if (late && !has_come(counters[r], value)) missing.push_back(r);
  }
  if (!missing.empty()) {
    throw LinkFailure{.kind = LinkFailure::Kind::Late, .ranks = std::move(missing), .reason = {}};
  }
}

void Company::abort(std::string_view reason) noexcept {
  uint32_t running = Header::Running;
  if (!header().state.compare_exchange_strong(running, Header::Aborting)) return;
  const auto kept = reason.substr(0, header().reason.size() - 1);
  std::copy(kept.begin(), kept.end(), header().reason.begin());
  header().state = Header::Aborted;
}

void Company::expect_running() const {
  if (header().state != Header::Aborted) return;
  throw LinkFailure{.kind = LinkFailure::Kind::Aborted, .ranks = {}, .reason = header().reason.data()};
}

std::optional<std::string> Company::gone(int rank, const Counter& counter, uint32_t value) {
  // In this order: it may come and leave at any time.
  if (seat(rank).left != 0) return has_come(counter, value) ? std::nullopt : std::optional<std::string>("has left the group");
  const pid_t pid = seat(rank).pid;
  if (pid == 0 || pid == ::getpid()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  auto& peer = peers_[rank];
  if (!peer) peer = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  pollfd watched{.fd = peer.get(), .events = POLLIN, .revents = 0};
  // Where there are no pid descriptors (an old kernel, a sandbox), asking for the pid must do.
  const bool dead = peer ? ::poll(&watched, 1, 0) > 0 : ::kill(pid, 0) != 0 && errno == ESRCH;
  if (dead) return fmt::format("(process {}) has died", pid);
  return std::nullopt;
}

}  // namespace tessera
