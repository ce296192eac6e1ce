#include "tessera/shard/activation/segment_forward.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/tied.h"
#include "tessera/shard/activation/segment_recompute.h"
#include "tessera/shard/storage/paged_tensor.h"

namespace tessera::activation {
namespace {

at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto bytes = at::empty({0}, tensor.options().dtype(at::kByte));
  return bytes.set_(tensor.storage(), 0, {static_cast<int64_t>(tensor.storage().nbytes())}, {1}).clone();
}

/// Whether the operator draws random numbers from a state of cuDNN's own, and would draw other numbers if it ran again: restoring
/// libtorch's generator makes cuDNN start a new state.
bool draws_from_cudnn(const OperatorFacts& op, const Stack& stack) {
  if (!op.recurrent) return false;
  const auto argument = [&](const char* name) -> const c10::IValue& {
    return stack[stack.size() - op.arguments + static_cast<size_t>(*op.schema->argumentIndexWithName(name))];
  };
  return stack[stack.size() - op.arguments].toTensor().is_cuda() && argument("train").toBool() && argument("dropout").toDouble() > 0;
}

/// Pauses the watch, because generators of some devices call operators to read their state, and this pass is not fully constructed yet.
std::shared_ptr<Segment> segment_of(const SegmentCall& call, std::shared_ptr<ForwardRecord> record) {
  const Unwatched unwatched;
  return std::make_shared<Segment>(call, std::move(record));
}

}  // namespace

SegmentForward::SegmentForward(SegmentCall call, SegmentForward* outer)
    : SegmentPass(std::make_shared<ForwardRecord>()), outer_(outer), segment_(segment_of(call, record_)) {
  if (outer != nullptr) outer->record_->inner.push_back(record_);
  for (const auto& input : call.inputs) {
    segment_->save_input(input, outer != nullptr ? outer->save(input) : SavedTensor::offloaded(input, call.options));
    const auto* const storage = storage_of(input);
    if (storage == nullptr) continue;
    inputs_.emplace(storage, weak_storage_of(input));
    from_inputs_.insert(storage);
  }
}

SegmentForward::~SegmentForward() {
  const Unwatched unwatched;
  segment_->forward_ends();
}

std::unique_ptr<SegmentPass> SegmentForward::inner(SegmentCall call) {
  return std::make_unique<SegmentForward>(std::move(call), this);
}

void SegmentForward::result(at::Tensor& tensor) const {
  if (!tensor.requires_grad() || tensor.is_leaf() || !can_tie(tensor.device().type())) return;
  tensor.register_hook([segment = std::weak_ptr(segment_)](const at::Tensor& gradient) {
    if (const auto used = segment.lock()) used->note_gradient(gradient);
  });
}

void SegmentForward::note_operand(const at::Tensor& tensor, bool writes, const OperatorFacts& op) {
  if (outer_ != nullptr) outer_->note_operand(tensor, writes, op);
  const auto* const storage = storage_of(tensor);
  if (storage == nullptr || op.writes_no_values) return;
  if (writes) note_write(tensor, op);
  if (own_.contains(storage) || inputs_.contains(storage)) return;
  foreign_.insert(storage);
  if (reads_.emplace(storage, tensor.storage_offset()).second) segment_->note_read(tensor);
}

void SegmentForward::note_write(const at::Tensor& tensor, const OperatorFacts& op) {
  auto* const storage = storage_of(tensor);
  for (auto& kept : record_->kept) {
    for (auto& result : kept.results) {
      if (!result.value.is_of(storage)) continue;
      result.value.copy_values();
      result.changes = true;
    }
  }
  if (inputs_.contains(storage)) {
    throw UsageError(
        "{} changes an input of a checkpointed segment in place, but backward runs the segment again and needs the old input; use the "
        "operator that returns a new tensor (for modules, leave their option `inplace` unset)",
        op.name());
  }
  if (is_paged(tensor)) return;
  if (own_.contains(storage)) {
    record_->own_writes.try_emplace(storage, weak_storage_of(tensor));
    return;
  }
  const auto same = [&](const ForwardRecord::Write& write) { return write.storage._unsafe_get_target() == storage; };
  if (std::ranges::any_of(record_->writes, same)) return;
  const BelowPaging below;
  record_->writes.push_back({.storage = weak_storage_of(tensor), .before = bytes_of(tensor)});
}

void SegmentForward::note_step(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands,
                               const std::vector<bool>& written) {
  std::vector<bool> is_foreign(operands.size());
  bool depends = false, writes_foreign = false;
  for (size_t i = 0; i < operands.size(); i++) {
    const auto* const storage = storage_of(operands[i]);
    depends = depends || from_inputs_.contains(storage);
    writes_foreign = writes_foreign || (written[i] && !own_.contains(storage));
    const bool reads = i > 0 || !op.replaces;  // an operand that is only filled may have no values yet
    is_foreign[i] = reads && foreign_.contains(storage) && !is_paged(operands[i]);
  }
  const auto may_skip = op.random || writes_foreign ? MaySkip::Never : depends ? MaySkip::IfAsked : MaySkip::Always;
  record_->sequence.add(op, stack, operands, is_foreign, may_skip);
}

void SegmentForward::note_results(const Stack& stack, size_t base, const std::vector<at::Tensor>& operands) {
  for_each_operand(stack, base, [&](size_t, size_t, const at::Tensor& tensor) {
    const auto* const storage = storage_of(tensor);
    if (storage == nullptr) return;
    const bool is_new = std::ranges::find(operands, storage, storage_of) == operands.end();
    for (auto* pass = this; pass != nullptr; pass = pass->outer_) {
      // A new storage may lie at the address of a freed one; the entries of the freed one are then removed.
      const auto depends = [pass](const at::Tensor& operand) { return pass->from_inputs_.contains(storage_of(operand)); };
      if (std::ranges::any_of(operands, depends)) {
        pass->from_inputs_.insert(storage);
      } else if (is_new) {
        pass->from_inputs_.erase(storage);
      }
      if (!is_new) continue;
      pass->own_.insert(storage);
      pass->foreign_.erase(storage);
    }
  });
}

/// Counts the storage of `by` as the segment's own, because a recomputation makes it anew.
void SegmentForward::replaced(const at::Tensor& operand, const at::Tensor& by) {
  SegmentPass::replaced(operand, by);
  const auto* const storage = storage_of(by);
  for (auto* pass = this; pass != nullptr; pass = pass->outer_) {
    pass->own_.insert(storage);
    pass->foreign_.erase(storage);
    if (pass->from_inputs_.contains(storage_of(operand))) pass->from_inputs_.insert(storage);
  }
}

void SegmentForward::run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) {
  const auto base = stack.size() - op.arguments;
  const bool updates = op.updates_statistics && stack[base + OperatorFacts::kTraining].toBool();
  std::vector<at::Tensor> operands, given;
  std::vector<bool> written;
  for_each_operand(stack, base, [&](size_t i, size_t, const at::Tensor& tensor) {
    operands.push_back(tensor);
    given.push_back(given_by_program(tensor));
    written.push_back(op.writes[i] || (updates && (i == OperatorFacts::kRunningMean || i == OperatorFacts::kRunningMean + 1)));
    note_operand(given.back(), written.back(), op);
  });
  if (is_of_program(op)) note_step(op, stack, given, written);
  if (!keeps(op) && !(is_of_program(op) && draws_from_cudnn(op, stack))) {
    handle.redispatchBoxed(below, &stack);
    return note_results(stack, base, operands);
  }
  auto& kept = record_->kept.emplace_back();
  kept.step = record_->sequence.size() - 1;
  keeping_ = &kept;
  operands_ = &operands;
  try {
    handle.redispatchBoxed(below, &stack);
  } catch (...) {
    keeping_ = nullptr;
    kept.must_run = true;  // so that a recomputation runs it and fails in the same way
    throw;
  }
  keeping_ = nullptr;
  note_results(stack, base, operands);
  for (size_t i = base; i < stack.size() && !kept.must_run; i++) {
    kept.must_run = !stack[i].isTensor() || !stack[i].toTensor().defined() || !own_.contains(storage_of(stack[i].toTensor()));
  }
  for (size_t i = base; i < stack.size() && !kept.must_run; i++) {
    const auto& result = stack[i].toTensor();
    kept.results.push_back({.value = SavedTensor::offloaded(result, segment_->options()), .requires_grad = result.requires_grad()});
  }
  if (op.random && !kept.must_run) kept.rng_after.emplace(devices_of(operands));
}

SavedTensor SegmentForward::save(const at::Tensor& tensor) {
  const auto* const storage = storage_of(tensor);
  const bool is_foreign = is_paged(tensor) || (storage != nullptr && foreign_.contains(storage));
  if (keeping_ != nullptr) {
    if (is_foreign) return SavedTensor::in_memory(tensor);
    for (size_t i = 0; i < operands_->size(); i++) {
      const auto& operand = (*operands_)[i];
      if (storage == nullptr || storage_of(operand) != storage || operand.scalar_type() != tensor.scalar_type()) continue;
      const auto slot = segment_->add(tensor);
      keeping_->slots.push_back({.slot = slot,
                                 .operand = i,
                                 .sizes = tensor.sizes().vec(),
                                 .strides = tensor.strides().vec(),
                                 .offset = tensor.storage_offset() - operand.storage_offset()});
      return {segment_, slot};
    }
    return SavedTensor::offloaded(tensor, segment_->options());
  }
  if (is_foreign) {
    record_->saved.emplace_back();
    return SavedTensor::in_memory(tensor);
  }
  const auto slot = segment_->add(tensor);
  record_->saved.emplace_back(slot);
  return {segment_, slot};
}

}  // namespace tessera::activation
