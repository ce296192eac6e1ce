#include "tessera/comm/levels/levels_link.h"

#include <algorithm>

#include "tessera/comm/groups/all_or_none.h"

namespace tessera {
namespace {

// A wait for another host lasts this much longer than the time limit, so that the ranks of that host, which know who of them is late, are
// the first to give up.
constexpr auto kLonger = std::chrono::milliseconds(500);

}  // namespace

LevelsLink::LevelsLink(std::shared_ptr<Link> inner, std::shared_ptr<Link> outer, Topology topology)
    : inner_(std::move(inner)),
      outer_(std::move(outer)),
      topology_(std::move(topology)),
      host_(topology_.host_of(outer_->rank())),
      to_(static_cast<size_t>(topology_.ranks())),
      from_(to_.size()) {}

/// Runs a part of an operation in which a rank that is late may itself wait for another host.
template <class Act>
void LevelsLink::among_all(const Act& act) {
  try {
    act();
  } catch (LinkFailure& failure) {
    failure.is_guess = failure.kind == LinkFailure::Kind::Late;
    throw;
  }
}

/// Adds the digests within each host, then those of the hosts, then tells each host the result.
void LevelsLink::combine(Digest& digest, Clock::time_point deadline) {
  among_all([&] {
    inner_->combine(digest, deadline);
    const int hosts = topology_.hosts();
    const auto leader = [&](int host) { return static_cast<size_t>(topology_.ranks_on(host % hosts).front()); };
    for (int distance = 1; distance < hosts; distance *= 2) {
      Digest received;
      std::ranges::fill(to_, ConstBytes());
      std::ranges::fill(from_, Bytes());
      if (place() == 0) {
        to_[leader(host_ + distance)] = std::as_bytes(std::span(&digest, 1));
        from_[leader(host_ + hosts - distance)] = std::as_writable_bytes(std::span(&received, 1));
      }
      outer_->exchange(to_, from_, deadline + kLonger);
      digest.add(received);
    }
    inner_->combine(digest, deadline + 2 * kLonger);
  });
}

/// Sends `own` to one rank of each other host, and receives what this rank takes care of.
void LevelsLink::receive_from_hosts(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) {
  std::ranges::fill(to_, ConstBytes());
  std::ranges::fill(from_, Bytes());
  for (int host = 0; host < topology_.hosts(); host++) {
    if (host != host_) to_[static_cast<size_t>(topology_.partner(rank(), host))] = own;
  }
  for_each_turn([&](std::span<const int> ranks) {
    if (topology_.host_of(ranks.front()) == host_ || place() >= std::ssize(ranks)) return;
    const auto sender = static_cast<size_t>(ranks[static_cast<size_t>(place())]);
    from_[sender] = from[sender];
  });
  outer_->exchange(to_, from_, deadline + kLonger);
}

void LevelsLink::all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) {
  among_all([&] {
    receive_from_hosts(own, from, deadline);
    for_each_turn([&](std::span<const int> ranks) {
      const auto here = std::span(from_).first(ranks_here().size());
      ConstBytes passed;
      for (size_t place = 0; place < here.size(); place++) {
        here[place] = place < ranks.size() ? from[static_cast<size_t>(ranks[place])] : Bytes();
        if (static_cast<int>(place) == this->place()) passed = place < ranks.size() && ranks[place] == rank() ? own : here[place];
      }
      inner_->all_gather(passed, here, deadline + 2 * kLonger);
    });
  });
}

void LevelsLink::all_gather_on_host(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) {
  among_all([&] {
    receive_from_hosts(own, from, deadline);
    Digest nothing;
    inner_->combine(nothing, deadline + 2 * kLonger);
  });
}

void LevelsLink::exchange(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) {
  among_all([&] { outer_->exchange(to, from, deadline + kLonger); });
}

void LevelsLink::all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) {
  among_all([&] { outer_->all_to_all(to, visit, deadline + kLonger); });
}

void LevelsLink::all_to_all_on_host(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) {
  among_all([&] { inner_->all_to_all(to, visit, deadline); });
}

std::unique_ptr<Link> LevelsLink::split(std::span<const int> members, Clock::time_point deadline) {
  std::vector<int> here;
  for (const int member : members) {
    if (topology_.host_of(member) == host_) here.push_back(topology_.place_of(member));
  }
  auto part = topology_.part(members);
  std::unique_ptr<Link> inner, outer;
  // Both splits are collective, and other ranks of this host may become a part of another kind.
  among_all([&] {
    inner = inner_->split(here, deadline);
    outer = outer_->split(members, deadline);
  });
  if (part.hosts() == 1) return inner;
  if (part.hosts() == part.ranks()) return outer;
  return std::make_unique<LevelsLink>(std::move(inner), std::move(outer), std::move(part));
}

SharedAttempt LevelsLink::share(const AreaShape& shape, Clock::time_point deadline) {
  const auto here = ranks_here().size();
  SharedAttempt attempt;
  among_all([&] {
    const size_t bytes = (shape.bytes_per_rank * to_.size() + here - 1) / here;
    attempt = inner_->share({.bytes_per_rank = bytes, .counters = shape.counters}, deadline);
  });
  if (const auto found = AllOrNone::first(all_gather_texts(*this, attempt.why_not, deadline))) return {.why_not = found->words};
  return attempt;
}

void LevelsLink::abort(std::string_view reason, int culprit) noexcept {
  outer_->abort(reason, culprit);  // first, because it publishes the reason before connections close
  inner_->abort(reason, culprit);
}

}  // namespace tessera
