#include "tessera/comm/host/link.h"

#include <fmt/format.h>

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera {

std::vector<int> Link::part_of_world(std::span<const int> members) const {
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(world_ranks()[member]);
  return ranks;
}

SharedAttempt Link::share(const AreaShape& /*shape*/, Clock::time_point /*deadline*/) {
  return {.why_not = "its ranks have no memory in common"};
}

std::vector<std::string> all_gather_texts(Link& link, const std::string& own, Clock::time_point deadline) {
  const uint64_t size = own.size();
  std::vector<std::string> texts(link.size());
  Digest sizes{.what = {}, .known = Extremes::of(size)};
  link.combine(sizes, deadline);
  if (sizes.known.most == 0) return texts;
  const auto lengths = all_gather_values(link, size, deadline);
  std::vector<Bytes> from;
  for (size_t r = 0; r < texts.size(); r++) {
    texts[r].resize(lengths[r]);
    from.push_back(std::as_writable_bytes(std::span(texts[r])));
  }
  link.all_gather(std::as_bytes(std::span(own)), from, deadline);
  return texts;
}

std::vector<int> members_of(std::span<const int> colors, int rank) {
  std::vector<int> members;
  for (int r = 0; r < std::ssize(colors); r++) {
    if (colors[r] == colors[rank]) members.push_back(r);
  }
  return members;
}

GroupTraits with_ranks_of(const Link& link, GroupTraits traits) {
  traits.size = link.size();
  traits.local_ranks = {link.rank()};
  traits.world_ranks.assign(link.world_ranks().begin(), link.world_ranks().end());
  if (traits.topology.ranks() == 1) traits.topology = Topology::one_host(traits.size);  // the caller has named no hosts
  if (traits.topology.ranks() != traits.size) {
    throw UsageError("hosts are named for {} ranks, but there are {}", traits.topology.ranks(), traits.size);
  }
  return traits;
}

GroupTraits with_ranks_of(const Link& part, GroupTraits whole, std::span<const int> colors) {
  whole.topology = whole.topology.part(members_of(colors, whole.local_ranks.front()));
  return with_ranks_of(part, std::move(whole));
}

LinkFailure others_are_late(const Link& link) {
  const auto all = link.world_ranks();
  LinkFailure failure{.kind = LinkFailure::Kind::Late, .ranks = {all.begin(), all.end()}, .reason = {}, .is_guess = true};
  failure.ranks.erase(failure.ranks.begin() + link.rank());
  return failure;
}

std::exception_ptr error_of(const LinkFailure& failure, std::string_view what, std::chrono::milliseconds limit, std::string_view rest) {
  const auto ranks = name_ranks(failure.ranks);
  switch (failure.kind) {
    case LinkFailure::Kind::Late: {
      const auto seconds = std::chrono::duration<double>(limit).count();
      return std::make_exception_ptr(TimeoutError("{}, waited {} s for {} and gave up{}", what, seconds, ranks, rest));
    }
    case LinkFailure::Kind::Gone:
      return std::make_exception_ptr(CommError("{}, can't finish: {} {}{}", what, ranks, failure.reason, rest));
    case LinkFailure::Kind::Deadlocked:
    case LinkFailure::Kind::Aborted:
      break;
  }
  return std::make_exception_ptr(CommError("{}, was broken off: {}", what, failure.reason));
}

std::string why_not_started(const LinkFailure& failure) {
  return fmt::format("{} {}", failure.ranks.empty() ? "it was broken off:" : name_ranks(failure.ranks),
                     failure.kind == LinkFailure::Kind::Late ? "did not join" : failure.reason);
}

void copy_own(ConstBytes own, Bytes target) {
  if (!own.empty() && own.data() != target.data()) std::memcpy(target.data(), own.data(), own.size());
}

}  // namespace tessera
