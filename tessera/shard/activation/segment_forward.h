// SegmentForward: watches the forward of a segment. It distinguishes tensors that the segment makes from tensors that it only reads, and
// records what a recomputation has to repeat.
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
  // Weak references keep the address of a freed input from being given to another storage, which is not an input.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> inputs_;
  Storages own_, foreign_;  // own: storages made in this segment; foreign: storages that it reads, but that are neither own nor inputs
  Storages from_inputs_;    // inputs, and own storages whose values depend on inputs
  std::set<std::pair<const c10::StorageImpl*, int64_t>> reads_;  // the foreign storages that were read, with the offset of the tensor
  ForwardRecord::Kept* keeping_ = nullptr;                       // the operator that runs, if its results are kept
  const std::vector<at::Tensor>* operands_ = nullptr;            // the operands of that operator
};

}  // namespace tessera::activation
