// SegmentPass: this thread is in a segment, in its forward or in a recomputation. It sees every operator, and every tensor that is saved, as
// with torch.autograd.graph.saved_tensors_hooks.
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

/// What the forward of a segment has done, as far as its recomputation has to know.
struct ForwardRecord {
  /// A change in place of memory that is not the segment's, such as running statistics. A recomputation repeats it on a copy.
  struct Write {
    WeakStorage storage;
    at::Tensor before;  // its bytes
  };
  /// An operator that is not to run again.
  struct Kept {
    struct Result {
      SavedTensor value;
      bool requires_grad;
      bool changes = false;  // in place, after the operator
    };
    /// A slot whose tensor is a view of one of the operator's operands.
    struct FromOperand {
      size_t slot, operand;
      std::vector<int64_t> sizes, strides;
      int64_t offset;  // from the operand's
    };
    size_t step = 0;  // of the sequence
    std::vector<Result> results = {};
    std::vector<FromOperand> slots = {};
    bool must_run = false;                   // its results are views of its operands, or no tensors, or it has failed
    std::optional<RngState> rng_after = {};  // of an operator that draws random numbers
  };

  KeepRule keep;
  OperatorSequence sequence = {};
  std::vector<std::optional<size_t>> saved = {};  // the slot of each tensor that was saved; none for those that stayed in memory
  std::vector<Write> writes = {};
  // Changed in place as well, but made by this forward. One that the program has kept would change twice.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> own_writes = {};
  std::vector<Kept> kept = {};
  std::vector<std::shared_ptr<ForwardRecord>> inner = {};  // of the segments in this one
};

/// A call of a segment's function with new inputs.
struct SegmentCall {
  const Options& options;
  const std::vector<at::Tensor>& inputs;
  detail::Again again;
  const torch::nn::Module* module;  // what `again` calls, or null
};

/// It lasts as long as the object.
class SegmentPass : public Watcher {
 public:
  /// Of this thread, or null.
  static SegmentPass* current() { return dynamic_cast<SegmentPass*>(Watcher::current()); }

  bool opens(const OperatorFacts& op, c10::DispatchKeySet keys) const final;
  at::Tensor instead_of(const at::Tensor& operand) const override { return operand; }
  void replaced(const at::Tensor& operand, const at::Tensor& by) override;
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
  /// The operand of the program, if the library has put this tensor in its place and it is still there.
  at::Tensor given_by_program(const at::Tensor& tensor) const;

  const std::shared_ptr<ForwardRecord> record_;

 private:
  struct Replacement {
    at::Tensor by;
    WeakTensor operand;
  };
  std::unordered_map<const c10::StorageImpl*, Replacement> replacements_;  // by their storages
  const int graph_task_;
  const Watching watching_;
};

}  // namespace tessera::activation
