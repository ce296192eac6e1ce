// Where the ranks of one host lay their gradients for each other, unit after unit.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/host/envelope.h"
#include "tessera/shard/unit/unit_memory.h"

namespace tessera {

class SharedArea;

/// Each rank has two slots. In turn k it packs gradients into its slot k % 2 and says so; some time later it adds up its own part of what
/// all have packed, in rank order, and says that, too. In turn k + 2 a slot is packed again, when all have added up turn k. So the sum of
/// one unit may wait until the next is packed, and rarely finds that another rank is not there yet.
class GradientSlots {
 public:
  /// Those of a group: all units that are sharded over it take turns.
  static std::shared_ptr<GradientSlots> of(const Communicator& group);
  explicit GradientSlots(Communicator group) : group_(std::move(group)) {}

  /// Units of that many bytes will come. All ranks say so in the same order.
  void expect(size_t bytes);
  GradientBuffers buffers(std::span<const GradientPlan> plans, std::chrono::milliseconds limit);
  /// What a reduction keeps of itself. Whoever reduces again and again uses it again, when the work is done.
  struct Turn;
  static std::shared_ptr<Turn> make_turn();
  /// Pieces whose wholes are the buffers that were handed out last. The work is done by whoever waits for it.
  Work reduce(std::shared_ptr<Turn> turn, std::span<const Piece> pieces, const Subject& subject, std::chrono::milliseconds limit);

  /// What is under way is given up. All ranks say so, at a time when none of them packs.
  void start_anew();

 private:
  std::byte* slot(int rank, uint32_t turn) const;
  void make_area(std::chrono::milliseconds limit);
  void finish_through(uint32_t turn);
  void add_up(Turn& turn);

  const Communicator group_;
  std::mutex packing_;
  std::mutex mutex_;
  size_t expected_ = 0;  // bytes of a slot
  size_t size_ = 0;
  std::shared_ptr<SharedArea> area_;
  uint32_t turn_ = 0;
  c10::SmallVector<std::shared_ptr<Turn>, 2> open_;  // packed, but not added up
  std::vector<Envelope> envelopes_;                  // of all ranks, of one turn
  std::vector<at::Tensor> contributions_;            // of all ranks, to one buffer
};

}  // namespace tessera
