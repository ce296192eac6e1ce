#include "tessera/shard/activation/segment_recompute.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"

namespace tessera::activation {
namespace {

namespace ag = torch::autograd;

at::Tensor view_of(const at::Tensor& bytes, const at::Tensor& like) {
  return at::empty({0}, like.options()).set_(bytes.storage(), like.storage_offset(), like.sizes(), like.strides());
}

/// The gradient function of the inputs of a recomputation, at which its graph ends.
class Beginning final : public ag::Node {
 public:
  ag::variable_list apply(ag::variable_list&&) override {
    throw UsageError(
        "a backward pass inside a checkpointed segment does not end at the inputs of the segment; give autograd::grad the inputs to stop at");
  }
};

}  // namespace

at::Tensor stand_in(const at::Tensor& values, bool requires_grad) {
  auto tensor = detached(values);
  if (!requires_grad) return tensor;
  const auto node = compat::make_node<Beginning>();  // makes it no leaf: a leaf that requires gradients can't be changed in place
  node->add_input_metadata(tensor);
  ag::impl::set_gradient_edge(tensor, ag::Edge(node, 0));
  return tensor;
}

SegmentRecompute::SegmentRecompute(std::shared_ptr<ForwardRecord> record, Slots* slots, SegmentRecompute* outer)
    : SegmentPass(std::move(record)), slots_(slots), outer_(outer), check_(record_->sequence) {
  const BelowPaging below;
  for (const auto& write : record_->writes) {
    if (auto storage = write.storage.lock()) copies_.push_back({.storage = std::move(storage), .bytes = write.before.clone()});
  }
}

std::unique_ptr<SegmentPass> SegmentRecompute::inner(SegmentCall call) {
  for (const auto& input : call.inputs) save(input);
  if (inner_ == record_->inner.size()) refuse_difference("it contains more segments than in forward");
  return std::make_unique<SegmentRecompute>(record_->inner[inner_++], nullptr, this);
}

void SegmentRecompute::result(at::Tensor& tensor) const {
  // Drops the graph of the result, which would keep the activations of the inner segment.
  tensor = stand_in(tensor, tensor.requires_grad());
}

bool SegmentRecompute::asked_is_recompute() {
  check_.asked();
  return true;
}

const SegmentRecompute::Copy* SegmentRecompute::copy_of(const at::Tensor& tensor) const {
  // Prefers the copy of the outermost recomputation, because operators of the outer segments read that copy later.
  const auto* const outer = outer_ != nullptr ? outer_->copy_of(tensor) : nullptr;
  if (outer != nullptr) return outer;
  const auto found = std::ranges::find(copies_, storage_of(tensor), [](const Copy& copy) { return copy.storage.get(); });
  return found == copies_.end() ? nullptr : &*found;
}

at::Tensor SegmentRecompute::instead_of(const at::Tensor& operand) const {
  const auto* const copy = operand.defined() && operand.has_storage() ? copy_of(operand) : nullptr;
  if (copy == nullptr) return operand;
  const BelowPaging below;
  return stand_in(view_of(copy->bytes, operand), operand.requires_grad());
}

/// Returns the operands for the comparison with forward, which compares operands in host memory by value, and other operands by storage.
std::vector<at::Tensor> SegmentRecompute::compared(const Stack& stack, size_t base) const {
  auto operands = tensors_on(stack, base);
  for (auto& operand : operands) {
    operand = given_by_program(operand);
    if (operand.is_cpu()) operand = instead_of(operand);
  }
  return operands;
}

void SegmentRecompute::run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) {
  if (op.writes_no_values) return handle.redispatchBoxed(below, &stack);
  const auto* const kept = is_of_program(op) ? kept_at(check_.next(op, stack, compared(stack, stack.size() - op.arguments))) : nullptr;
  for (size_t i = stack.size() - op.arguments; i < stack.size() && has_copies(); i++) {
    change_operands(stack[i], [&](const at::Tensor& operand) { return instead_of(operand); });
  }
  expect_own_writes(op, stack);
  if (kept != nullptr) return repeat_kept(*kept, handle, op, below, stack);
  handle.redispatchBoxed(below, &stack);
}

void SegmentRecompute::expect_own_writes(const OperatorFacts& op, const Stack& stack) const {
  for_each_operand(stack, stack.size() - op.arguments, [&](size_t i, size_t, const at::Tensor& tensor) {
    if (!op.writes[i] || !record_->own_writes.contains(storage_of(tensor))) return;
    throw UsageError(
        "{} changes a {} tensor of shape [{}] in place that a checkpointed segment has made in forward and kept, so the tensor "
        "would change twice when the segment runs again in backward; make it before the segment, for example in a constructor",
        op.name(), c10::toString(tensor.scalar_type()), joined(tensor.sizes()));
  });
}

const ForwardRecord::Kept* SegmentRecompute::kept_at(size_t step) {
  while (kept_ < record_->kept.size() && record_->kept[kept_].step < step) kept_++;
  return kept_ < record_->kept.size() && record_->kept[kept_].step == step ? &record_->kept[kept_] : nullptr;
}

void SegmentRecompute::repeat_kept(const ForwardRecord::Kept& kept, const c10::OperatorHandle& handle, const OperatorFacts& op,
                                   c10::DispatchKeySet below, Stack& stack) {
  const auto base = stack.size() - op.arguments;
  const auto operands = tensors_on(stack, base);
  if (kept.must_run) {
    ignores_ = true;
    const auto end = c10::make_scope_exit([&] { ignores_ = false; });
    handle.redispatchBoxed(below, &stack);
  } else {
    torch::jit::drop(stack, op.arguments);
    for (const auto& [value, requires_grad, changes] : kept.results) {
      const BelowPaging below;
      stack.emplace_back(stand_in(changes ? value.get().clone() : value.get(), requires_grad));
    }
    if (kept.rng_after) kept.rng_after->set();
  }
  if (slots_ == nullptr) return;
  for (const auto& [slot, operand, sizes, strides, offset] : kept.slots) {
    const BelowPaging below;
    slots_->fill(slot, operands[operand].as_strided(sizes, strides, operands[operand].storage_offset() + offset));
  }
}

SavedTensor SegmentRecompute::save(const at::Tensor& tensor) {
  if (!ignores_) {
    if (saved_ == record_->saved.size()) refuse_difference("it saved more tensors than in forward");
    const auto slot = record_->saved[saved_++];
    if (slot && slots_ != nullptr) slots_->fill(*slot, tensor);
  }
  // Only backward passes inside the segment read this tensor: the graph of a recomputation is dropped when the recomputation ends.
  return SavedTensor::in_memory(tensor);
}

}  // namespace tessera::activation
