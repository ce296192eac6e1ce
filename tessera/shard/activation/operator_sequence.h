// OperatorSequence: what a segment does in forward, operator by operator. When it recomputes, it has to do the same with the same tensors:
// if it reads what forward has left in a member, or what a counter says, it computes something else, and what the program keeps in its
// members changes twice.
#pragma once

#include <map>
#include <tuple>
#include <vector>

#include "tessera/shard/activation/tensor_version.h"
#include "tessera/shard/dispatch/operators.h"

namespace tessera::activation {

/// When a recomputation may go on without an operator.
enum class MaySkip {
  Never,    // it draws random numbers or changes what is not the segment's, which is done to a copy again
  IfAsked,  // what it does depends on inputs, so the program must have asked is_recompute()
  Always,   // a constant, which the program may keep
};

/// All tensors on the stack, from `base` on, that are defined.
std::vector<at::Tensor> tensors_on(const Stack& stack, size_t base);

class OperatorSequence {
 public:
  /// Called before an operator runs in forward, with its operands on the stack, which are these tensors and other values. `is_foreign` says
  /// of each tensor whether it comes from outside of the segment and is no input.
  void add(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands, const std::vector<bool>& is_foreign,
           MaySkip may_skip);
  size_t size() const { return steps_.size(); }

 private:
  friend class SequenceCheck;

  struct Foreign {
    /// Whether an operand may stand in its place in a recomputation. Values of a device are not read: there it has to be the same tensor.
    bool allows(const at::Tensor& operand) const;

    WeakStorage storage;
    std::optional<uint64_t> values;  // when it was read for the first time
    bool is_on_device;
  };
  struct Read {
    size_t operand, foreign;
  };
  struct Step {
    const OperatorFacts* op;
    uint64_t form;  // of the operator, the shapes of its tensors, and its other arguments
    MaySkip may_skip;
    size_t reads_begin, reads_end;
  };

  size_t number_of(const at::Tensor& foreign);

  std::vector<Step> steps_;
  std::vector<Read> reads_;
  std::vector<Foreign> foreign_;
  std::map<std::tuple<const c10::StorageImpl*, int64_t, int64_t>, size_t> numbers_;  // of foreign tensors: by storage, offset and numel
};

/// Compares a recomputation with forward.
class SequenceCheck {
 public:
  explicit SequenceCheck(const OperatorSequence& sequence) : sequence_(sequence) {}

  /// Called before an operator runs on `operands`. Returns which step of the sequence it is; throws UsageError if forward did something else.
  size_t next(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands);
  /// The program has asked whether it recomputes.
  void asked() { asked_ = true; }

 private:
  /// An operand that is not what forward has read in its place; null if there is none.
  const at::Tensor* other_operand(const OperatorSequence::Step& step, const std::vector<at::Tensor>& operands) const;
  void accept(size_t step, const std::vector<at::Tensor>& operands);

  const OperatorSequence& sequence_;
  size_t next_ = 0;
  bool asked_ = false;
  std::vector<std::pair<const c10::StorageImpl*, int64_t>> seen_;  // for each foreign tensor, what was read in its place
};

}  // namespace tessera::activation
