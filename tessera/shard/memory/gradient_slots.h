// Shared memory into which the ranks of one host pack gradients, so that each rank can add up its own part of the gradients of all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/host/link.h"
#include "tessera/shard/memory/unit_memory.h"

namespace tessera {

class SharedArea;

/// Each rank has two slots. In turn k it packs gradients into its slot k % 2 and counts up kPacked. Later it adds up its own part of what
/// all ranks have packed, in rank order, and counts up kAdded. It may pack turn k + 2 into the same slot when all ranks have added up turn
/// k. A rank can therefore put off the sum of one unit until it has packed the next; by then the other ranks have usually packed as well,
/// and it need not wait. If slots are larger than kLargeSlot, each rank has only one slot, because the memory of a second slot is worth
/// more than this overlap: turn k is then added up before turn k + 1 is packed.
class GradientSlots {
 public:
  static constexpr size_t kLargeSlot = size_t{32} << 20;  // bytes

  /// The slots of a shard group. All units that are sharded over the group share them.
  static std::shared_ptr<GradientSlots> of(const Communicator& group);
  explicit GradientSlots(Communicator group) : group_(std::move(group)) {}

  /// Makes the slots large enough for a unit of `bytes` when they are next allocated. All ranks call it in the same order.
  void reserve(size_t bytes);
  /// Whether each rank has only one slot, so that buffers() has to finish the sum of the previous turn. The unit of that turn should take
  /// its sum first, because otherwise buffers() stores the sum in private memory.
  bool packs_after_sum();
  /// Returns buffers in this rank's next slot. Waits until all ranks have added up the turn that was in that slot before. Collective if the
  /// slots have to grow.
  GradientBuffers buffers(std::span<const GradientPlan> plans, std::chrono::milliseconds limit);
  /// Sets how many evaluations this rank has begun, for the next reduction. If some ranks have begun more than others, one of these ranks
  /// logs a warning, once, because without shared memory this would be an error.
  void note_evaluations(uint64_t number) {
    const std::lock_guard lock(mutex_);
    evaluations_ = number;
  }
  /// The state of one reduction. To avoid an allocation in each step, a caller may use a Turn again once its work is done.
  struct Turn;
  static std::shared_ptr<Turn> make_turn();
  /// Starts to reduce the pieces; their `whole` must be the buffers that buffers() returned last. The sum is computed by the thread that
  /// waits for the returned work. With `take`, that thread computes only the parts for which `take` asks, and stores none.
  Work reduce(std::shared_ptr<Turn> turn, std::span<const Piece> pieces, const Subject& subject, std::chrono::milliseconds limit,
              Reduce op = Reduce::Mean, TakeMean take = {});

  /// Abandons all reductions that have not finished; waiting for them throws CommError. All ranks call it, while none of them packs.
  void reset();

 private:
  std::byte* slot(int rank, uint32_t turn) const;
  void make_area(std::chrono::milliseconds limit);
  void finish_through(uint32_t turn, const Turn* awaited = nullptr);
  void compare_evaluations(uint32_t turn);
  void add_up(Turn& turn, bool awaited);
  void add_up(const Turn& turn, const at::Tensor& whole, int64_t begin, const at::Tensor& target, double* squares = nullptr);

  const Communicator group_;
  std::mutex packing_;
  std::mutex mutex_;
  size_t announced_ = 0;  // the size of a slot for which units have called reserve(), in bytes
  size_t expected_ = 0;   // the size of a slot when slots are next allocated, in bytes
  size_t size_ = 0;
  std::shared_ptr<SharedArea> area_;
  std::array<size_t, 2> written_{};  // bytes of each slot that were written, in a dry run
  uint32_t turn_ = 0;
  uint64_t evaluations_ = 0;
  bool compares_evaluations_ = true;
  c10::SmallVector<std::shared_ptr<Turn>, 2> open_;  // turns that are packed, but not added up
  std::vector<ConstBytes> contributions_;            // the gradients of all ranks for one buffer; a member so that its memory is reused
};

}  // namespace tessera
