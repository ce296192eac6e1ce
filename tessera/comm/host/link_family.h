// What the groups of a rank have in common: links that fail together, the record of operations, and the rank that made them fail.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/comm/host/flight_recorder.h"
#include "tessera/comm/host/link.h"
#include "tessera/comm/host/lookout.h"

namespace tessera {

/// All links that were split from one another and still exist.
class LinkFamily {
 public:
  void add(const std::shared_ptr<Link>& link);
  FlightRecorder& recorder() { return *recorder_; }
  /// From now on, report() collects what all ranks that have met in the store have recorded. Without it, report() does nothing.
  void look_out(const StorePtr& store, const Identity& identity) { lookout_.emplace(store, identity, recorder_); }
  void report(std::string_view incident, std::string_view reason) const noexcept {
    if (lookout_) lookout_->report(incident, reason);
  }
  /// Aborts all links. The other ranks get the reason with "rank R: " in front, where R is the world rank that aborts.
  void abort(int world_rank, std::string_view reason, int culprit) noexcept;

 private:
  std::vector<std::shared_ptr<Link>> alive();

  std::mutex mutex_;
  std::vector<std::weak_ptr<Link>> links_;
  const std::shared_ptr<FlightRecorder> recorder_ = std::make_shared<FlightRecorder>();
  std::optional<Lookout> lookout_;
};

/// The rank that made rank `own` fail, both by their numbers in the world. If it is another one, it is recorded for the launcher.
int record_culprit(const LinkFailure& failure, int own) noexcept;

}  // namespace tessera
