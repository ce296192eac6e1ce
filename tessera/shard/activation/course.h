// Course: what the first run of a segment does, operator by operator. A later run has to do the same with the same tensors: if it reads what
// the first one has left in a member, or what a counter says, it computes something else, and what the program keeps in its members changes
// twice.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera {
struct OperatorFacts;
}

namespace tessera::activation {

/// When a later run may go on without an operator.
enum class LeftOut {
  Never,    // it draws random numbers or changes what is not the segment's, and later runs do that on a copy
  IfAsked,  // what it does depends on inputs, so the program must have asked runs_again()
  Freely,   // a constant, which the program may keep
};

class Course {
 public:
  /// Called before an operator runs in the first run, with its operands on the stack from `base` on. `is_foreign` tells of each of its
  /// tensors whether it comes from outside and is no input.
  void note(const OperatorFacts& op, const torch::jit::Stack& stack, size_t base, LeftOut left_out, const std::vector<bool>& is_foreign);
  size_t steps() const { return steps_.size(); }

 private:
  friend class Follower;

  struct Foreign {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::optional<uint64_t> values;  // when it was read for the first time
  };
  struct Read {
    size_t operand, foreign;
  };
  struct Step {
    const OperatorFacts* op;
    uint64_t form;  // of the operator, the shapes of its tensors, and its other arguments
    LeftOut left_out;
    size_t reads_end;
  };

  size_t number_of(const at::Tensor& foreign);

  std::vector<Step> steps_;
  std::vector<Read> reads_;
  std::vector<Foreign> foreign_;
  std::map<std::tuple<const c10::StorageImpl*, int64_t, int64_t>, size_t> numbers_;  // of foreign tensors: by storage, offset and numel
};

/// Goes along with a later run.
class Follower {
 public:
  explicit Follower(const Course& course) : course_(course) {}

  /// Called before an operator runs. Returns which step of the course it is; throws UsageError if the first run did something else.
  size_t follow(const OperatorFacts& op, const torch::jit::Stack& stack, size_t base);
  /// The program has asked which run this is.
  void let_leave_out() { asked_ = true; }

 private:
  /// An operand that is not what the first run has read in its place; null if there is none.
  const at::Tensor* other_operand(size_t step, const std::vector<at::Tensor>& operands) const;
  void accept(size_t step, const std::vector<at::Tensor>& operands);
  bool may_pass(const Course::Step& step) const;

  const Course& course_;
  size_t next_ = 0;
  bool asked_ = false;
  std::vector<std::pair<const c10::StorageImpl*, int64_t>> seen_;  // for each foreign tensor, what this run has read in its place
};

}  // namespace tessera::activation
