#include "tessera/shard/activation/operator_sequence.h"

#include <fmt/ranges.h>

#include <functional>

namespace tessera::activation {
namespace {

/// Returns a hash of `hash` and one more number.
uint64_t mixed(uint64_t hash, uint64_t number) {
  hash = (hash ^ number) * 0x9e3779b97f4a7c15ULL;
  return hash ^ hash >> 29;
}

template <class T>
uint64_t mixed_all(uint64_t hash, const T& values) {
  hash = mixed(hash, values.size());
  for (const auto value : values) hash = mixed(hash, std::hash<std::remove_cvref_t<decltype(value)>>()(value));
  return hash;
}

uint64_t mixed_in(uint64_t hash, const at::Tensor& tensor) {
  if (!tensor.defined()) return mixed(hash, 0);
  hash = mixed(hash, 1 + static_cast<uint64_t>(tensor.scalar_type()));
  return tensor.layout() == at::kStrided ? mixed_all(hash, tensor.sizes()) : hash;
}

uint64_t mixed_in(uint64_t hash, const c10::IValue& value) {
  if (value.isTensor()) return mixed_in(hash, value.toTensor());
  if (value.isInt()) return mixed(hash, static_cast<uint64_t>(value.toInt()));
  if (value.isDouble()) return mixed(hash, std::hash<double>()(value.toDouble()));
  if (value.isBool()) return mixed(hash, value.toBool() ? 2 : 3);
  if (value.isNone()) return mixed(hash, 4);
  if (value.isIntList()) return mixed_all(hash, value.toIntVector());
  if (value.isDoubleList()) return mixed_all(hash, value.toDoubleVector());
  if (value.isBoolList()) return mixed_all(hash, value.toBoolList().vec());
  if (value.isString()) return mixed(hash, std::hash<std::string_view>()(value.toStringView()));
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return mixed(mixed(hash, std::hash<double>()(number.real())), std::hash<double>()(number.imag()));
  }
  if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
    const auto& elements = value.toListRef();
    hash = mixed(hash, elements.size());
    for (const auto& element : elements) hash = mixed_in(hash, element);
  }
  return hash;  // devices, generators and the like are left out
}

uint64_t form_of(const OperatorFacts& op, const Stack& stack) {
  auto hash = mixed(0, reinterpret_cast<uintptr_t>(op.schema));
  for (size_t i = stack.size() - op.arguments; i < stack.size(); i++) hash = mixed_in(hash, stack[i]);
  return hash;
}

[[noreturn]] void refuse_operand(const OperatorFacts& op, const at::Tensor& operand) {
  refuse_difference(
      fmt::format("{} reads a {} tensor of shape [{}] that is not the one which it read in forward, or has other values now", op.name(),
                  c10::toString(operand.scalar_type()), fmt::join(operand.sizes(), ", ")),
      "the program has assigned that tensor or written it through a pointer. Change it in place by an operator, as in buffer.copy_(x), whose "
      "effect backward does not repeat; or change it outside of the segment; or give it as an input");
}

[[noreturn]] void refuse_step(const OperatorFacts& op, const OperatorFacts* before) {
  const auto other = before == nullptr             ? std::string("where forward had ended")
                     : before->name() == op.name() ? std::string("with other arguments than in forward")
                                                   : fmt::format("in place of {}", before->name());
  refuse_difference(fmt::format("it called {} {}", op.name(), other),
                    "it must depend only on its inputs and parameters, so not on counters that it changes; code that should run only in "
                    "forward can ask activation::is_recompute()");
}

}  // namespace

std::vector<at::Tensor> tensors_on(const Stack& stack, size_t base) {
  std::vector<at::Tensor> tensors;
  for_each_operand(stack, base, [&](size_t, size_t, const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

bool OperatorSequence::Foreign::allows(const at::Tensor& operand) const {
  if (is_on_device) return storage_of(operand) == storage._unsafe_get_target();
  return !values || digest_of(operand) == values;
}

size_t OperatorSequence::number_of(const at::Tensor& foreign) {
  const auto [found, is_new] = numbers_.try_emplace({storage_of(foreign), foreign.storage_offset(), foreign.numel()}, foreign_.size());
  if (is_new) foreign_.push_back({.storage = weak_storage_of(foreign), .values = digest_of(foreign), .is_on_device = !foreign.is_cpu()});
  return found->second;
}

void OperatorSequence::add(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands,
                           const std::vector<bool>& is_foreign, MaySkip may_skip) {
  const auto begin = reads_.size();
  for (size_t i = 0; i < operands.size(); i++) {
    if (is_foreign[i]) reads_.push_back({.operand = i, .foreign = number_of(operands[i])});
  }
  steps_.push_back({.op = &op, .form = form_of(op, stack), .may_skip = may_skip, .reads_begin = begin, .reads_end = reads_.size()});
}

const at::Tensor* SequenceCheck::other_operand(const OperatorSequence::Step& step, const std::vector<at::Tensor>& operands) const {
  for (size_t i = step.reads_begin; i < step.reads_end; i++) {
    const auto& read = sequence_.reads_[i];
    const auto& foreign = sequence_.foreign_[read.foreign];
    const auto& operand = operands[read.operand];
    const c10::StorageImpl* const storage = storage_of(operand);
    if (read.foreign < seen_.size() && seen_[read.foreign] == std::pair(storage, operand.storage_offset())) continue;
    const bool is_variable = operand.is_leaf() && operand.requires_grad();
    if (is_variable && foreign.storage._unsafe_get_target() == storage) continue;  // Segment::expect_unchanged() has compared its version
    if (!foreign.allows(operand)) return &operand;
  }
  return nullptr;
}

void SequenceCheck::accept(size_t step, const std::vector<at::Tensor>& operands) {
  for (size_t i = sequence_.steps_[step].reads_begin; i < sequence_.steps_[step].reads_end; i++) {
    const auto& [operand, foreign] = sequence_.reads_[i];
    if (seen_.size() <= foreign) seen_.resize(sequence_.foreign_.size());
    seen_[foreign] = {storage_of(operands[operand]), operands[operand].storage_offset()};
  }
  next_ = step + 1;
}

size_t SequenceCheck::next(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands) {
  const auto form = form_of(op, stack);
  const at::Tensor* other = nullptr;
  for (size_t at = next_; at < sequence_.steps_.size(); at++) {
    const auto& step = sequence_.steps_[at];
    if (step.form == form) {
      const auto* const found = other_operand(step, operands);
      if (found == nullptr) {
        accept(at, operands);
        return at;
      }
      if (other == nullptr) other = found;
    }
    if (step.may_skip == MaySkip::Never || (step.may_skip == MaySkip::IfAsked && !asked_)) break;
  }
  if (other != nullptr) refuse_operand(op, *other);
  refuse_step(op, next_ < sequence_.steps_.size() ? sequence_.steps_[next_].op : nullptr);
}

}  // namespace tessera::activation
