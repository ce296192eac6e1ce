#include "tessera/shard/dispatch/operators.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <atomic>

namespace tessera {
namespace {

bool is_view(const c10::FunctionSchema& schema) {
  if (schema.arguments().empty()) return false;
  const auto* alias = schema.arguments().front().alias_info();
  return alias != nullptr && !alias->isWrite();
}

bool can_be_deferred(const c10::OperatorHandle& handle, const c10::FunctionSchema& schema) {
  if (handle.hasTag(at::Tag::data_dependent_output) || handle.hasTag(at::Tag::dynamic_output_shape)) return false;
  return std::ranges::all_of(schema.returns(), [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) || result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

std::optional<size_t> argument_of(c10::TypeKind kind, const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto type = schema.arguments()[i].real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == kind) return i;
  }
  return std::nullopt;
}

struct KnownOperator {
  const c10::Argument* arguments;  // distinguishes operators whose schemas had the same address, because a library was unloaded
  OperatorFacts facts;
  KnownOperator* next;
};

/// A hash table of linked lists. Entries are only ever added, at the heads, so readers need no lock.
class Table {
 public:
  const OperatorFacts& find(const c10::OperatorHandle& handle) {
    const auto& schema = handle.schema();
    auto& head = heads_[(reinterpret_cast<uintptr_t>(&schema) >> 6) % heads_.size()];
    auto* const first = head.load(std::memory_order_acquire);
    for (const auto* entry = first; entry != nullptr; entry = entry->next) {
      if (entry->facts.schema == &schema && entry->arguments == schema.arguments().data()) return entry->facts;
    }
    auto* const made = new KnownOperator{.arguments = schema.arguments().data(), .facts = OperatorFacts(handle), .next = first};
    // If two threads add the same operator, it has two equal entries.
    while (!head.compare_exchange_weak(made->next, made, std::memory_order_release)) {
    }
    return made->facts;
  }

 private:
  std::array<std::atomic<KnownOperator*>, 1024> heads_ = {};
};

/// The index of the weight, for operators by which the layers of libtorch apply their weights.
std::optional<size_t> weight_of(const c10::FunctionSchema& schema) {
  constexpr std::string_view kLayers[] = {"aten::linear", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::embedding", "aten::batch_norm"};
  // torch::nn::Linear multiplies by weight.t().
  const bool is_product = schema.name() == "aten::addmm" || schema.name() == "aten::mm";
  const auto* name = schema.name() == "aten::matmul" ? "other" : is_product ? "mat2" : nullptr;
  if (std::ranges::find(kLayers, schema.name()) != std::end(kLayers)) name = "weight";
  const auto place = name == nullptr ? std::nullopt : schema.argumentIndexWithName(name);
  return place ? std::optional(static_cast<size_t>(*place)) : std::nullopt;
}

/// Whether an operator on lists of tensors works value by value. libtorch does not tag such operators, for which GPUs have kernels of their
/// own.
bool is_elementwise_on_lists(std::string_view name) {
  constexpr std::string_view kPrefix = "aten::_foreach_";
  if (!name.starts_with(kPrefix)) return false;
  const auto what = name.substr(kPrefix.size());
  return what != "norm" && what != "powsum" && what != "max";
}

}  // namespace

std::span<const OperatorException> operator_exceptions() {
  using Facts = OperatorFacts;
  // Never destroyed, because operators also run after main.
  static const auto& table = *new std::vector<OperatorException>{
      {&Facts::elementwise,
       {"aten::copy_", "aten::zero_", "aten::fill_", "aten::masked_fill", "aten::masked_fill_"},
       "each value depends only on values at its position, but libtorch has not tagged these operators pointwise"},
      {&Facts::elementwise,
       {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"},
       "they work tensor by tensor and value by value on their lists, but libtorch tags only operators on single tensors"},
      {&Facts::elementwise, {"aten::_is_any_true"}, "autograd's anomaly mode looks for NaNs with it, and each rank may look at its own values"},
      {&Facts::inspects, {"aten::_is_any_true"}, "its result describes this rank's values, and is read at once"},
      {&Facts::writes_no_values,
       {"aten::requires_grad_", "aten::retain_grad", "aten::detach_", "aten::set_data"},
       "their schemas say that they write, but no value changes"},
      {&Facts::recurrent,
       {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"},
       "their modules keep a second list of weights, which to() fills from parameters()"},
      {&Facts::sets_storage, {"aten::set_.source_Tensor"}, "torch::load gives a parameter its values with it"},
      {&Facts::rebinds, {"aten::set_", "aten::resize_"}, "a parameter would be cut off from the memory of its unit"},
      {&Facts::compares_kinds, {"aten::_has_compatible_shallow_copy_type"}, "set_data calls no other operator that paging could see"},
      {&Facts::clones, {"aten::clone"}, "Module::clone copies parameters with it"},
      {&Facts::updates_statistics,
       {"aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit"},
       "their schemas do not say that running statistics are written"},
      {&Facts::transposes, {"aten::t"}, "torch::nn::Linear multiplies by its result, and a function that replaces the product has to know the weight"},
      {&Facts::replaces,
       {"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::exponential_",
        "aten::cauchy_", "aten::log_normal_", "aten::geometric_", "aten::bernoulli_"},
       "a schema does not say whether a write also reads the old values"},
  };
  return table;
}

OperatorFacts::OperatorFacts(const c10::OperatorHandle& handle)
    : handle(handle),
      schema(&handle.schema()),
      arguments(schema->arguments().size()),
      device(argument_of(c10::TypeKind::DeviceObjType, *schema)),
      generator(argument_of(c10::TypeKind::GeneratorType, *schema)),
      weight(weight_of(*schema)),
      from_libtorch(name().starts_with("aten::")),
      implicit_autograd(handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)),
      random(handle.hasTag(at::Tag::nondeterministic_seeded)),
      backward(name().ends_with("_backward")),
      needs_values(!can_be_deferred(handle, *schema)),
      views(is_view(*schema)),
      elementwise(handle.hasTag(at::Tag::pointwise) && !handle.hasTag(at::Tag::data_dependent_output)),
      elementwise_lists(is_elementwise_on_lists(name())) {
  for (const auto& argument : schema->arguments()) writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  const auto full_name = name() + "." + schema->overload_name();
  for (const auto& [fact, names, reason] : operator_exceptions()) {
    this->*fact = this->*fact || std::ranges::any_of(names, [&](const auto& each) { return each == name() || each == full_name; });
  }
}

bool OperatorFacts::is_composite(c10::DispatchKeySet keys) const {
  using c10::DispatchKey;
  const auto backend = keys.highestBackendKey();
  const auto own = c10::toRuntimePerBackendFunctionalityKey(DispatchKey::Dense, backend);
  if (backend != c10::BackendComponent::InvalidBit && handle.hasKernelForDispatchKey(own)) return false;
  return implicit_autograd || handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

OperatorKind OperatorFacts::kind(c10::DispatchKeySet keys) const {
  if (views) return OperatorKind::View;
  if (elementwise) return OperatorKind::Elementwise;
  if (from_libtorch && is_composite(keys)) return OperatorKind::Composite;  // paging sees the operators that it calls
  return elementwise_lists ? OperatorKind::Elementwise : OperatorKind::Other;
}

const OperatorFacts& facts_of(const c10::OperatorHandle& handle) {
  // Never destroyed, because operators also run after main.
  static auto* const table = new Table;
  return table->find(handle);
}

void put_operand(c10::IValue& value, size_t element, at::Tensor tensor) {
  if (value.isTensorList()) {
    auto list = value.toTensorList().copy();
    list.set(element, std::move(tensor));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    auto list = value.toOptionalTensorList().copy();
    list.set(element, tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt);
    value = std::move(list);
  } else {
    value = std::move(tensor);
  }
}

}  // namespace tessera
