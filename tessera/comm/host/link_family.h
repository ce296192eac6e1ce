// Links that fail together, and on whose account.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/comm/host/link.h"

namespace tessera {

/// All links that were split from one another, as far as they still exist.
class LinkFamily {
 public:
  void add(const std::shared_ptr<Link>& link);
  /// The others hear the reason as that of `rank`.
  void abort(int rank, std::string_view reason, int culprit) noexcept;

 private:
  std::vector<std::shared_ptr<Link>> alive();

  std::mutex mutex_;
  std::vector<std::weak_ptr<Link>> links_;
};

/// The rank of the world that makes rank `own` of a group fail, on record for the launcher if it is another one. `world_ranks` are those of
/// the group's ranks.
int record_culprit(const LinkFailure& failure, int own, std::span<const int> world_ranks) noexcept;

}  // namespace tessera
