// Where the ranks of one host lay their gradients for each other, unit after unit.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/shared_area.h"

namespace tessera {

/// Gradients of one buffer on their way to the sum.
struct GradientPlan {
  int64_t numel = 0;
  at::ScalarType dtype;  // in which they travel
  at::Device device;
};

/// Each rank has two slots. In turn k it packs gradients into its slot k % 2 and says so; some time later it adds up its own part of what
/// all have packed, in rank order, and says that, too. In turn k + 2 a slot is packed again, when all have added up turn k. So the sum of
/// one unit may wait until the next is packed, and rarely finds that another rank is not there yet.
class GradientSlots : public std::enable_shared_from_this<GradientSlots> {
 public:
  /// The one of the group.
  static std::shared_ptr<GradientSlots> of(const Communicator& shard);
  explicit GradientSlots(Communicator shard) : shard_(std::move(shard)) {}

  /// Units of that many bytes will come.
  void expect(size_t bytes);
  std::vector<at::Tensor> room(std::span<const GradientPlan> plans);
  /// Pieces whose wholes are the rooms handed out last.
  Work reduce(std::span<const Piece> pieces, const Subject& subject);

 private:
  struct Turn;
  std::byte* slot(int rank, uint32_t turn) const;
  void make_area(size_t bytes);
  void finish_through(uint32_t turn);
  void add_up(const Turn& turn);

  Communicator shard_;
  std::mutex mutex_;
  size_t expected_ = 0;  // bytes of a slot
  size_t size_ = 0;
  std::shared_ptr<SharedArea> area_;
  uint32_t turn_ = 0;
  std::deque<std::shared_ptr<Turn>> open_;  // packed, but not added up
};

}  // namespace tessera
