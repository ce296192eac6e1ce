// SegmentRecompute: the pass in which a segment runs again in backward, repeats its forward, and fills its slots.
#pragma once

#include "tessera/shard/activation/segment_pass.h"
#include "tessera/simulate/flops.h"

namespace tessera::activation {

class SegmentRecompute final : public SegmentPass {
 public:
  /// `outer` is the recomputation around this one, or null. Inside an outer recomputation `slots` is null, because the inner segment fills
  /// its slots when it recomputes by itself.
  SegmentRecompute(std::shared_ptr<ForwardRecord> record, Slots* slots, SegmentRecompute* outer);

  void run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) override;
  SavedTensor save(const at::Tensor& tensor) override;
  std::unique_ptr<SegmentPass> inner(SegmentCall call) override;
  void result(at::Tensor& tensor) const override;
  bool asked_is_recompute() override;
  at::Tensor instead_of(const at::Tensor& operand) const override;

 private:
  /// A storage that forward has changed, and the copy that the recomputation changes.
  struct Copy {
    c10::intrusive_ptr<c10::StorageImpl> storage;
    at::Tensor bytes;
  };

  bool has_copies() const { return !copies_.empty() || (outer_ != nullptr && outer_->has_copies()); }
  const Copy* copy_of(const at::Tensor& tensor) const;
  std::vector<at::Tensor> compared(const Stack& stack, size_t base) const;
  void expect_own_writes(const OperatorFacts& op, const Stack& stack) const;
  /// The kept results of an operator in forward; null if it was not kept.
  const ForwardRecord::Kept* kept_at(size_t step);
  void repeat_kept(const ForwardRecord::Kept& kept, const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below,
                   Stack& stack);

  const simulate::Uncounted uncounted_;  // what runs again is not the work of the model
  Slots* const slots_;
  SegmentRecompute* const outer_;
  SequenceCheck check_;
  std::vector<Copy> copies_;
  size_t saved_ = 0, kept_ = 0, inner_ = 0;  // positions in the lists of the record
  bool ignores_ = false;                     // true while an operator runs whose saved tensors are not counted
};

/// Returns a tensor with these values that autograd treats as the result of an operator if `requires_grad`, else as a constant.
at::Tensor stand_in(const at::Tensor& values, bool requires_grad);

}  // namespace tessera::activation
