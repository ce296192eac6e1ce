// SegmentForward: the forward of a segment, watched. It finds out what is the segment's own and what it only reads, and records what a
// recomputation has to repeat.
#pragma once

#include <set>
#include <unordered_set>

#include "tessera/shard/activation/segment.h"

namespace tessera::activation {

class SegmentForward final : public SegmentPass {
 public:
  /// `outer` is the forward of the segment around this one, or null.
  SegmentForward(SegmentCall call, SegmentForward* outer);
  ~SegmentForward() override;

  void run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) override;
  void replaced(const at::Tensor& operand, const at::Tensor& by) override;
  SavedTensor save(const at::Tensor& tensor) override;
  std::unique_ptr<SegmentPass> inner(SegmentCall call) override;
  void result(at::Tensor& tensor) const override;

 private:
  void note_operand(const at::Tensor& tensor, bool writes, const OperatorFacts& op);
  void note_write(const at::Tensor& tensor, const OperatorFacts& op);
  void note_step(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands, const std::vector<bool>& written);
  void note_results(const Stack& stack, size_t base, const std::vector<at::Tensor>& operands);

  SegmentForward* const outer_;
  const std::shared_ptr<Segment> segment_;
  using Storages = std::unordered_set<const c10::StorageImpl*>;
  // Kept, because memory that an input has left may be given to another tensor, and that one is no input.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> inputs_;
  Storages own_, foreign_;                                       // own: made in this segment; foreign: read, and neither of the others
  Storages from_inputs_;                                         // own ones whose values depend on inputs
  std::set<std::pair<const c10::StorageImpl*, int64_t>> reads_;  // what was read of foreign ones: where it begins
  ForwardRecord::Kept* keeping_ = nullptr;                       // the operator that runs, if it is kept
  const std::vector<at::Tensor>* operands_ = nullptr;            // its operands
};

}  // namespace tessera::activation
