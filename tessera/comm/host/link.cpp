#include "tessera/comm/host/link.h"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <numeric>

#include "tessera/base/words.h"
#include "tessera/comm/host/envelope.h"
#include "tessera/comm/host/shared_area.h"

namespace tessera {

void Link::visit_all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) {
  const auto own = to[static_cast<size_t>(rank())];
  std::vector<std::byte> received(own.size() * to.size());
  std::vector<Bytes> from;
  for (size_t r = 0; r < to.size(); r++) from.push_back(Bytes(received).subspan(r * own.size(), own.size()));
  all_to_all(to, from, deadline);
  const std::vector<ConstBytes> rows(from.begin(), from.end());
  visit(0, rows);
}

std::vector<int> Link::part_of_world(std::span<const int> members) const {
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(world_ranks()[static_cast<size_t>(member)]);
  return ranks;
}

SharedAttempt Link::share(const AreaShape& /*shape*/, Clock::time_point /*deadline*/) {
  return {.area = nullptr, .why_not = "its ranks have no memory in common"};
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<std::string> all_gather_texts(Link& link, const std::string& own, Clock::time_point deadline) {
  using Row = std::array<char, 256>;
  Row row = {};
  own.copy(row.data(), row.size() - 1);
  std::vector<Row> rows(static_cast<size_t>(link.size()));
  std::vector<Bytes> from;
  for (auto& each : rows) from.push_back(std::as_writable_bytes(std::span(each)));
  link.all_gather(std::as_bytes(std::span(row)), from, deadline);
  std::vector<std::string> texts;
  for (const auto& each : rows) texts.emplace_back(each.data());
  return texts;
}

std::string why_not_started(const LinkFailure& failure) {
  return fmt::format("{} {}", failure.ranks.empty() ? "it was broken off:" : name_ranks(failure.ranks),
                     failure.kind == LinkFailure::Kind::Late ? "did not join" : failure.reason);
}

void copy_own(ConstBytes own, Bytes target) {
  if (!own.empty() && own.data() != target.data()) std::memcpy(target.data(), own.data(), own.size());
}

}  // namespace tessera
