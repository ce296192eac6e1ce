// LinkFamily: the groups of a rank that fail together, and the record of their operations. It tells the launcher which rank made them fail.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/control/peer_monitor.h"
#include "tessera/comm/host/link.h"
#include "tessera/comm/record.h"
#include "tessera/comm/transport.h"

namespace tessera {

/// All groups that were split from one another and still exist.
class LinkFamily {
 public:
  void add(const std::shared_ptr<Link>& link, const std::shared_ptr<Transport>& transport);
  const std::shared_ptr<Record>& record() const { return record_; }
  /// Makes report() log what all ranks that have met in the store have recorded. Before this call, report() does nothing.
  void monitor_peers(const StorePtr& store, const Identity& identity) { monitor_.emplace(store, identity, record_); }
  void report(std::string_view incident, std::string_view reason) const noexcept {
    if (monitor_) monitor_->report(incident, reason);
  }
  /// Returns those of `ranks` that have not reached an operation of a group, according to the records of the ranks that have met in the
  /// store.
  std::vector<int> missing(uint64_t group, uint64_t sequence, std::span<const int> ranks) const;
  /// Tells the launcher, and the other ranks unless they know already, that rank `own` of the world has failed with this message.
  void tell(const LinkFailure& failure, int own, std::string_view message);
  /// Ends all groups with this reason.
  void abort(std::string_view reason, int culprit) noexcept;

 private:
  using Member = std::pair<std::weak_ptr<Link>, std::weak_ptr<Transport>>;

  /// Ends operations that engines have under way on devices. Called on each rank that fails or learns of an abort, because other ranks
  /// can't end its operations.
  void end_transports(std::string_view reason) noexcept;
  std::vector<Member> members() {
    const std::lock_guard lock(mutex_);
    return members_;
  }

  std::mutex mutex_;
  std::vector<Member> members_;
  const std::shared_ptr<Record> record_ = std::make_shared<Record>();
  std::optional<PeerMonitor> monitor_;
};

}  // namespace tessera
