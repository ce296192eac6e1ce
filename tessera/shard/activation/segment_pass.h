// SegmentPass: a run of a segment on this thread, in forward or as a recomputation. It sees every operator, and every tensor that autograd
// saves, as with torch.autograd.graph.saved_tensors_hooks.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <unordered_map>

#include "tessera/base/weak_tensor.h"
#include "tessera/shard/activation/operator_sequence.h"
#include "tessera/shard/activation/rng_autocast.h"
#include "tessera/shard/activation/saved_tensor.h"
#include "tessera/shard/dispatch/watcher.h"

namespace torch::nn {
class Module;
}

namespace tessera::activation {

/// A record of the forward of a segment, as far as its recomputation needs it.
struct ForwardRecord {
  /// A change in place of memory that is not the segment's, such as running statistics. A recomputation repeats it on a copy.
  struct Write {
    WeakStorage storage;
    at::Tensor before;  // the bytes of the storage
  };
  /// An operator whose results are kept, so that a recomputation need not run it.
  struct Kept {
    struct Result {
      SavedTensor value;
      bool requires_grad;
      bool changes = false;  // whether a later operator changes it in place
    };
    /// A slot whose tensor is a view of one of the operator's operands.
    struct FromOperand {
      size_t slot, operand;
      std::vector<int64_t> sizes, strides;
      int64_t offset;  // relative to the offset of the operand
    };
    size_t step = 0;  // index in `sequence`
    std::vector<Result> results = {};
    std::vector<FromOperand> slots = {};
    bool must_run = false;  // a recomputation runs it nevertheless: its results are views of its operands, or no tensors, or it has failed
    std::optional<RngState> rng_after = {};  // the state after an operator that draws random numbers
  };

  KeepRule keep;
  OperatorSequence sequence = {};
  std::vector<std::optional<size_t>> saved = {};  // the slot of each saved tensor; none for a tensor that stayed in memory
  std::vector<Write> writes = {};
  // Storages that the segment has made and changed in place in this forward. If the program has kept such a storage, a recomputation would
  // change it a second time.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> own_writes = {};
  std::vector<Kept> kept = {};
  std::vector<std::shared_ptr<ForwardRecord>> inner = {};  // the records of the segments inside this segment
};

/// A call of a segment's function with new inputs.
struct SegmentCall {
  const Options& options;
  const std::vector<at::Tensor>& inputs;
  detail::Again again;
  const torch::nn::Module* module;  // the module that `again` calls, or null
};

/// A SegmentPass is the pass of its thread as long as the object exists.
class SegmentPass : public Watcher {
 public:
  /// The pass of this thread, or null.
  static SegmentPass* current() { return dynamic_cast<SegmentPass*>(Watcher::current()); }

  bool opens(const OperatorFacts& op, c10::DispatchKeySet keys) const final;
  at::Tensor instead_of(const at::Tensor& operand) const override { return operand; }
  void replaced(const at::Tensor& operand, const at::Tensor& by) override;
  /// Saves a tensor that autograd, or an inner segment, needs in backward.
  virtual SavedTensor save(const at::Tensor& tensor) = 0;

  /// Returns the pass of a segment inside this one.
  virtual std::unique_ptr<SegmentPass> inner(SegmentCall call) = 0;
  /// Called for each tensor that the segment returns; may replace the tensor.
  virtual void result(at::Tensor& /*tensor*/) const {}
  /// Returns whether this is a recomputation. Operators after the call may depend on the answer, so a recomputation may leave them out.
  virtual bool asked_is_recompute() { return false; }

 protected:
  explicit SegmentPass(std::shared_ptr<ForwardRecord> record);
  bool keeps(const OperatorFacts& op) const;
  /// Whether the program has called the operator. False for casts by the library, for operators that write only autograd metadata, and in a
  /// backward pass inside the segment, whose operators may differ when it runs again: it may add up gradients in place or not.
  bool is_of_program(const OperatorFacts& op) const;
  /// The program's operand, if the library has put `tensor` in its place and the operand still exists; else `tensor`.
  at::Tensor given_by_program(const at::Tensor& tensor) const;

  const std::shared_ptr<ForwardRecord> record_;

 private:
  struct Replacement {
    at::Tensor by;
    WeakTensor operand;
  };
  std::unordered_map<const c10::StorageImpl*, Replacement> replacements_;  // keyed by the storage of `by`
  const int graph_task_;
  const Watching watching_;
};

}  // namespace tessera::activation
