// OperatorSequence: the operators that a segment runs in forward. A recomputation has to run the same operators on the same
// tensors: a segment that reads state which forward has changed, such as a member or a counter, would compute something else, and would
// change that state twice.
#pragma once

#include <map>
#include <tuple>
#include <vector>

#include "tessera/shard/activation/tensor_version.h"
#include "tessera/shard/dispatch/operators.h"

namespace tessera::activation {

/// When a recomputation may leave out an operator.
enum class MaySkip {
  Never,    // it draws random numbers, or changes memory that is not the segment's, of which a recomputation changes a copy
  IfAsked,  // its results depend on the segment's inputs, so only a program that has called is_recompute() leaves it out on purpose
  Always,   // its results are constants, which the program may keep
};

/// Returns all defined tensors on the stack, from `base` on.
std::vector<at::Tensor> tensors_on(const Stack& stack, size_t base);

class OperatorSequence {
 public:
  /// Called before an operator runs in forward, with its arguments on the stack; `operands` are the tensors among them. `is_foreign` says
  /// of each operand whether it comes from outside of the segment and is not an input.
  void add(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands, const std::vector<bool>& is_foreign,
           MaySkip may_skip);
  size_t size() const { return steps_.size(); }

 private:
  friend class SequenceCheck;

  struct Foreign {
    /// Whether a recomputation may read `operand` in place of this tensor: in host memory if it has the same values, on a device if it has
    /// the same storage.
    bool allows(const at::Tensor& operand) const;

    WeakStorage storage;
    std::optional<uint64_t> values;  // a digest of the values when the tensor was read for the first time
    bool is_on_device;
  };
  struct Read {
    size_t operand, foreign;
  };
  struct Step {
    const OperatorFacts* op;
    uint64_t form;  // a hash of the operator, the shapes of its tensors, and its other arguments
    MaySkip may_skip;
    size_t reads_begin, reads_end;
  };

  size_t number_of(const at::Tensor& foreign);

  std::vector<Step> steps_;
  std::vector<Read> reads_;
  std::vector<Foreign> foreign_;
  // Indices in `foreign_`, keyed by storage, offset and numel.
  std::map<std::tuple<const c10::StorageImpl*, int64_t, int64_t>, size_t> numbers_;
};

/// Compares the operators of a recomputation with those of forward.
class SequenceCheck {
 public:
  explicit SequenceCheck(const OperatorSequence& sequence) : sequence_(sequence) {}

  /// Called before an operator runs on `operands`. Returns its step in the sequence; throws UsageError if forward did something else.
  size_t next(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands);
  /// To be called when the program has asked is_recompute().
  void asked() { asked_ = true; }

 private:
  /// Returns an operand that differs from the tensor that forward has read in its place; null if there is none.
  const at::Tensor* other_operand(const OperatorSequence::Step& step, const std::vector<at::Tensor>& operands) const;
  void accept(size_t step, const std::vector<at::Tensor>& operands);

  const OperatorSequence& sequence_;
  size_t next_ = 0;
  bool asked_ = false;
  std::vector<std::pair<const c10::StorageImpl*, int64_t>> seen_;  // for each foreign tensor, the storage and offset read in its place
};

}  // namespace tessera::activation
