// Links that fail together, and the rank that made them fail.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/comm/host/link.h"

namespace tessera {

/// All links that were split from one another and still exist.
class LinkFamily {
 public:
  void add(const std::shared_ptr<Link>& link);
  /// Aborts all links. The other ranks get the reason with "rank R: " in front, where R is the world rank that aborts.
  void abort(int world_rank, std::string_view reason, int culprit) noexcept;

 private:
  std::vector<std::shared_ptr<Link>> alive();

  std::mutex mutex_;
  std::vector<std::weak_ptr<Link>> links_;
};

/// The world rank that made rank `own` of a group fail. If it is another rank, it is recorded for the launcher. `world_ranks` maps the
/// ranks of the group to world ranks.
int record_culprit(const LinkFailure& failure, int own, std::span<const int> world_ranks) noexcept;

}  // namespace tessera
