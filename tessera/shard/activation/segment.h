// Segment: a part of a program whose activations are recomputed in backward.
//
// Autograd builds the graph of a segment as usual, but tensors that its nodes save go through hooks, which keep the number of a slot
// instead of the values. The first node that asks for a slot in backward makes the segment recompute; the tensors that are saved then fill
// the slots in the same order. So there is one graph and one backward pass, and units are reduced as without checkpointing.
#pragma once

#include "tessera/shard/activation/segment_pass.h"

namespace tessera::activation {

/// Owned by the nodes of its graph.
class Segment final : public Slots {
 public:
  Segment(const SegmentCall& call, std::shared_ptr<ForwardRecord> record);

  const Options& options() const { return options_; }

  // Called in the forward of the segment.
  void save_input(const at::Tensor& input, SavedTensor saved);
  /// Notes that the segment reads a tensor from outside of the segment. The tensor must not have changed when the segment recomputes.
  void note_read(const at::Tensor& tensor);
  void forward_ends();
  /// Notes the gradient of a result, in backward, before the segment recomputes. Used only on devices where recomputed values are tied to
  /// that gradient.
  void note_gradient(const at::Tensor& gradient) { gradients_.push_back(gradient); }

 private:
  struct Input {
    SavedTensor saved;
    bool requires_grad;
  };
  struct Read {
    c10::VariableVersion counter;
    uint32_t version;
    c10::StorageImpl* storage;  // only compared by address
  };

  void recompute() override;
  void end_pass() override { gradients_.clear(); }
  void expect_unchanged() const;

  const Options options_;
  const detail::Again again_;  // owns the module
  const torch::nn::Module* const module_;
  const std::shared_ptr<ForwardRecord> record_;
  const std::vector<c10::Device> devices_;
  std::vector<Input> inputs_;
  std::vector<Read> reads_;
  std::vector<at::Tensor> gradients_;
  std::optional<RngState> rng_;
  const AutocastState autocast_;
};

}  // namespace tessera::activation
