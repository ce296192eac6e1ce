#include "tessera/comm/control/link_family.h"

#include <exception>
#include <string>

#include "tessera/base/launch_record.h"
#include "tessera/comm/control/flight_report.h"

namespace tessera {
namespace {

// The incident under which every time-out is reported. One is enough, because the first time-out ends all groups.
constexpr auto kLateRanks = "late";

}  // namespace

void LinkFamily::add(const std::shared_ptr<Link>& link, const std::shared_ptr<Transport>& transport) {
  const std::lock_guard lock(mutex_);
  std::erase_if(members_, [](const Member& known) { return known.first.expired(); });
  members_.emplace_back(link, transport);
}

std::vector<int> LinkFamily::missing(uint64_t group, uint64_t sequence, std::span<const int> ranks) const {
  return monitor_ ? not_come(monitor_->ask(kLateRanks), group, sequence, ranks) : std::vector<int>();
}

void LinkFamily::tell(const LinkFailure& failure, int own, std::string_view message) {
  using Kind = LinkFailure::Kind;
  int culprit = own;
  if (!failure.ranks.empty()) culprit = failure.ranks.front();
  if (failure.kind == Kind::Aborted) culprit = failure.culprit;
  record_failure_in_world(own, culprit);
  if (failure.kind == Kind::Deadlocked) return end_transports(failure.reason);
  // Groups of other links may not have heard of it.
  if (failure.kind == Kind::Aborted) return abort(failure.reason, failure.culprit);
  if (failure.kind == Kind::Late) report(kLateRanks, message);
  abort(message, culprit);
}

void LinkFamily::end_transports(std::string_view reason) noexcept try {
  for (const auto& [link, transport] : members()) {
    if (const auto own = transport.lock()) own->abort(reason);
  }
} catch (const std::exception&) {  // out of memory: the operations end at their own time limit
}

void LinkFamily::abort(std::string_view reason, int culprit) noexcept try {
  for (const auto& [link, transport] : members()) {
    if (const auto own = link.lock()) own->abort(reason, culprit);
  }
  end_transports(reason);
} catch (const std::exception&) {  // out of memory: the other ranks wait until their time limit
}

}  // namespace tessera
