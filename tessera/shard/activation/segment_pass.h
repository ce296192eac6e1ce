// SegmentPass: this thread is in a segment, in its forward or in a recomputation. It sees every operator and every tensor that is saved.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tessera/shard/activation/forward_record.h"
#include "tessera/shard/activation/saved_tensor_hooks.h"
#include "tessera/shard/dispatch/watcher.h"

namespace torch::nn {
class Module;
}

namespace tessera::activation {

/// A call of a segment's function with new inputs.
struct SegmentCall {
  const Options& options;
  const std::vector<at::Tensor>& inputs;
  detail::Again again;
  const torch::nn::Module* module;  // what `again` calls, or null
};

/// It lasts as long as the object.
class SegmentPass : public Watcher, public SavedTensorHooks {
 public:
  /// Of this thread, or null.
  static SegmentPass* current() { return dynamic_cast<SegmentPass*>(Watcher::current()); }

  bool opens(const OperatorFacts& op, c10::DispatchKeySet keys) const final;
  void hold(const at::Tensor& cast) final { casts_.push_back(cast); }
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() final;
  /// A tensor that autograd, or a segment inside, needs in backward.
  virtual SavedTensor save(const at::Tensor& tensor) = 0;

  /// The pass of a segment inside of this one.
  virtual std::unique_ptr<SegmentPass> inner(SegmentCall call) = 0;
  /// Called for each result.
  virtual void result(at::Tensor& /*tensor*/) const {}
  /// Whether this is a recomputation. From now on, what depends on that may be left out.
  virtual bool asked_is_recompute() { return false; }

 protected:
  explicit SegmentPass(std::shared_ptr<ForwardRecord> record);
  bool keeps(const OperatorFacts& op) const;
  /// Whether the program has called the operator. A backward pass inside of a segment adds gradients up as it finds them, in place or not.
  bool is_of_program(const OperatorFacts& op) const;

  const std::shared_ptr<ForwardRecord> record_;

 private:
  std::vector<at::Tensor> casts_;
  const int graph_task_;
  const Watching watching_;
};

}  // namespace tessera::activation
