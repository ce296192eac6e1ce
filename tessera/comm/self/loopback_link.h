// A link without other ranks: every simulated peer sends what this rank sends. It serves worlds of one rank, and simulated worlds.
#pragma once

#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/host/link.h"

namespace tessera {

class LoopbackLink : public Link {
 public:
  LoopbackLink(int rank, std::vector<int> world_ranks) : rank_(rank), world_ranks_(std::move(world_ranks)) {}

  int rank() const override { return rank_; }
  std::span<const int> world_ranks() const override { return world_ranks_; }
  void combine(Digest& digest, Clock::time_point deadline) override;
  void all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) override;
  void exchange(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) override;
  void all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) override;
  std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point deadline) override;
  SharedAttempt share(const AreaShape& shape, Clock::time_point deadline) override;
  void abort(std::string_view reason, int culprit) noexcept override;

 protected:
  /// Memory for all ranks of the group, of which this one is the only one there. `sharers`: how many share it in a dry run.
  SharedAttempt share_with_nobody(const AreaShape& shape, size_t sharers);

 private:
  void expect_running();

  int rank_;
  const std::vector<int> world_ranks_;
  std::mutex mutex_;
  std::optional<LinkFailure> aborted_;
};

}  // namespace tessera
