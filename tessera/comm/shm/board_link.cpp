#include "tessera/comm/shm/board_link.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "tessera/comm/shm/futex.h"

namespace tessera {
namespace {

constexpr size_t kSlot = size_t{1} << 20;
constexpr auto kLookAround = std::chrono::milliseconds(50);  // how often a waiting rank checks that the others are alive
constexpr int kSpins = 200;

template <class Span>
Span stretch(Span bytes, size_t begin, size_t most) {
  const auto rest = bytes.subspan(std::min(begin, bytes.size()));
  return rest.first(std::min(most, rest.size()));
}

void put(std::byte* slot, ConstBytes bytes) {
  if (!bytes.empty()) std::memcpy(slot, bytes.data(), bytes.size());
}

void take(Bytes bytes, const std::byte* slot) {
  if (!bytes.empty()) std::memcpy(bytes.data(), slot, bytes.size());
}

}  // namespace

struct alignas(64) BoardLink::Header {
  enum State : uint32_t { Running, Aborting, Aborted };
  std::atomic<uint32_t> state = Running;
  std::array<char, 1020> reason = {};  // ends with a zero
};

struct alignas(64) BoardLink::Seat {
  std::atomic<uint32_t> turn = 0;      // the last turn that the rank has come to
  std::atomic<uint32_t> sleepers = 0;  // ranks asleep until it comes to the next
  std::atomic<uint32_t> left = 0;      // it has gone, as planned
  std::atomic<int32_t> pid = 0;
};

size_t BoardLink::block_size(int ranks) {
  return sizeof(Header) + static_cast<size_t>(ranks) * (sizeof(Seat) + 2 * kSlot);
}

BoardLink::BoardLink(SharedBlock block, int rank, int ranks)
    : block_(std::move(block)), rank_(rank), ranks_(ranks), peers_(static_cast<size_t>(ranks)) {
  seat(rank_).pid = ::getpid();
}

BoardLink::~BoardLink() {
  seat(rank_).left = 1;
  futex_wake_all(seat(rank_).turn);
}

BoardLink::Header& BoardLink::header() const {
  return *reinterpret_cast<Header*>(block_.data());
}

BoardLink::Seat& BoardLink::seat(int rank) const {
  return reinterpret_cast<Seat*>(block_.data() + sizeof(Header))[rank];
}

std::byte* BoardLink::slot(int rank) const {
  auto* slots = block_.data() + sizeof(Header) + static_cast<size_t>(ranks_) * sizeof(Seat);
  return slots + (static_cast<size_t>(rank) * 2 + turn_ % 2) * kSlot;
}

void BoardLink::gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) {
  expect_running();
  copy_own(own, from[rank_]);
  const size_t longest = std::ranges::max(from, {}, &Bytes::size).size();
  for (size_t begin = 0; begin < longest; begin += kSlot) {
    turn_++;
    put(slot(rank_), stretch(own, begin, kSlot));
    wait_for_all(deadline);
    for (int r = 0; r < ranks_; r++) {
      if (r != rank_) take(stretch(from[r], begin, kSlot), slot(r));
    }
  }
}

void BoardLink::transpose(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) {
  expect_running();
  copy_own(to[rank_], from[rank_]);
  // A slot has a compartment for each rank. What goes to a rank is as long as what it has for itself.
  const size_t room = kSlot / static_cast<size_t>(ranks_) / 64 * 64;
  const size_t longest = std::ranges::max(to, {}, &ConstBytes::size).size();
  for (size_t begin = 0; begin < longest; begin += room) {
    turn_++;
    for (int r = 0; r < ranks_; r++) {
      if (r != rank_) put(slot(rank_) + static_cast<size_t>(r) * room, stretch(to[r], begin, room));
    }
    wait_for_all(deadline);
    for (int r = 0; r < ranks_; r++) {
      if (r != rank_) take(stretch(from[r], begin, room), slot(r) + static_cast<size_t>(rank_) * room);
    }
  }
}

std::unique_ptr<Link> BoardLink::split(std::span<const int> members, Clock::time_point deadline) {
  const auto size = static_cast<int>(members.size());
  const bool leads = members.front() == rank_;
  std::optional<SharedBlock> block;
  if (leads) block = split_block_ = SharedBlock::make(block_.ticket().source, block_size(size));

  SharedBlock::Ticket own = leads ? block->ticket() : SharedBlock::Ticket();
  std::vector<SharedBlock::Ticket> tickets(static_cast<size_t>(ranks_));
  std::vector<Bytes> from;
  for (auto& ticket : tickets) from.push_back(std::as_writable_bytes(std::span(&ticket, 1)));
  gather(std::as_bytes(std::span(&own, 1)), from, deadline);
  if (!leads) block = SharedBlock::open(tickets[members.front()]);
  turn_++;
  wait_for_all(deadline);
  const auto position = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
  return std::make_unique<BoardLink>(std::move(*block), position, size);
}

void BoardLink::abort(std::string_view reason) noexcept {
  uint32_t running = Header::Running;
  if (header().state.compare_exchange_strong(running, Header::Aborting)) {
    const auto kept = reason.substr(0, header().reason.size() - 1);
    std::copy(kept.begin(), kept.end(), header().reason.begin());
    header().state = Header::Aborted;
  }
  for (int r = 0; r < ranks_; r++) futex_wake_all(seat(r).turn);
}

void BoardLink::wait_for_all(Clock::time_point deadline) {
  auto& own = seat(rank_);
  own.turn = turn_;
  if (own.sleepers > 0) futex_wake_all(own.turn);
  for (int r = 0; r < ranks_; r++) wait_for(r, deadline);
}

void BoardLink::expect_running() const {
  if (header().state != Header::Aborted) return;
  throw LinkFailure{.kind = LinkFailure::Kind::Aborted, .ranks = {}, .reason = header().reason.data()};
}

bool BoardLink::has_come(int rank) const {
  return static_cast<int32_t>(seat(rank).turn - turn_) >= 0;  // the count may wrap
}

void BoardLink::wait_for(int rank, Clock::time_point deadline) {
  auto& other = seat(rank);
  for (int spin = 0; spin < kSpins; spin++) {
    if (has_come(rank)) return;
  }
  for (;;) {
    const uint32_t seen = other.turn;
    if (has_come(rank)) return;
    expect_running();
    for (int r = rank; r < ranks_; r++) {
      if (has_come(r)) continue;
      if (const auto how = gone(r); how && !has_come(r)) throw LinkFailure{.kind = LinkFailure::Kind::Gone, .ranks = {r}, .reason = *how};
    }
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) {
      LinkFailure late{.kind = LinkFailure::Kind::Late, .ranks = {}, .reason = {}};
      for (int r = 0; r < ranks_; r++) {
        if (!has_come(r)) late.ranks.push_back(r);
      }
      if (late.ranks.empty()) return;
      throw late;
    }
    other.sleepers++;
    futex_wait(other.turn, seen, std::min<std::chrono::nanoseconds>(left, kLookAround));
    other.sleepers--;
  }
}

std::optional<std::string> BoardLink::gone(int rank) {
  if (seat(rank).left != 0) return "has left the group";
  const pid_t pid = seat(rank).pid;
  if (pid == 0 || pid == ::getpid()) return std::nullopt;
  auto& peer = peers_[rank];
  if (!peer) peer = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  pollfd watched{.fd = peer.get(), .events = POLLIN, .revents = 0};
  // Where there are no pid descriptors (an old kernel, a sandbox), asking for the pid must do.
  const bool dead = peer ? ::poll(&watched, 1, 0) > 0 : ::kill(pid, 0) != 0 && errno == ESRCH;
  if (dead) return fmt::format("(process {}) has died", pid);
  return std::nullopt;
}

}  // namespace tessera
