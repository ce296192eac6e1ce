// A link through memory that all ranks see.
#pragma once

#include <memory>
#include <optional>

#include "tessera/comm/host/link.h"
#include "tessera/comm/host/peer_group.h"

namespace tessera {

/// Each rank has two slots. In turn k it writes its slot k % 2, raises its counter to k, waits until all ranks have done so, and reads
/// their slots. It writes the same slot again in turn k + 2: by then all ranks have come to turn k + 1, so they have read the slot.
class SharedMemoryLink final : public Link {
 public:
  static size_t block_size(int ranks);

  SharedMemoryLink(SharedBlock block, int rank, std::vector<int> world_ranks);

  int rank() const override { return peers_->rank(); }
  std::span<const int> world_ranks() const override { return peers_->world_ranks(); }
  void combine(Digest& digest, Clock::time_point deadline) override;
  void all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) override;
  void exchange(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) override;
  void all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) override;
  std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point deadline) override;
  SharedAttempt share(const AreaShape& shape, Clock::time_point deadline) override;
  void ask(std::function<bool()> does_wait, std::function<std::string()> what, std::function<bool()> is_busy) override {
    peers_->ask(std::move(is_busy));
    does_wait_ = std::move(does_wait);
    what_ = std::move(what);
  }
  void used_by_this_thread() override { peers_->used_by_this_thread(); }
  void abort(std::string_view reason, int culprit) noexcept override { peers_->abort(reason, culprit); }

 private:
  std::span<Counter> turns() const;  // the last turn that each rank has come to
  std::byte* slot(int rank) const;   // the rank's slot in the current turn
  void next_turn(Clock::time_point deadline);
  /// Collective: opens the block of rank `leader`, which passes it as `own`. Throws IoError.
  SharedBlock open_from(int leader, const SharedBlock* own, Clock::time_point deadline);

  std::shared_ptr<PeerGroup> peers_;
  std::optional<SharedBlock> made_;  // a block that this rank made, kept because other ranks may open it later
  uint32_t turn_ = 0;
  std::function<bool()> does_wait_ = [] { return false; };
  std::function<std::string()> what_;
};

}  // namespace tessera
