// Facts about an operator, by which paging (the fallback that unshards the parameters that an operator reads) decides what to do. They are
// derived from the operator's registration, once, at the operator's first use.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

using Stack = torch::jit::Stack;

/// What an operator does with values.
enum class OperatorKind {
  View,         // returns views of its first argument and reads no values; to copy, it calls other operators, which paging handles
  Elementwise,  // each result value depends only on the operand values at the same position
  Composite,    // calls other operators for all that it does, and paging handles each of them
  Other,        // a kernel of the device that may do anything, or an operator that the device does not have
};

struct OperatorFacts {
  explicit OperatorFacts(const c10::OperatorHandle& handle);

  /// Returns the operator's kind on the device of these dispatch keys. Only operators of libtorch count as composites, because a program
  /// may register an operator as a composite that uses raw pointers.
  OperatorKind kind(c10::DispatchKeySet keys) const;
  /// Whether the operator has no kernel for the device of these keys, and is registered as a composite of other operators. A view may be a
  /// composite, too.
  bool is_composite(c10::DispatchKeySet keys) const;

  c10::OperatorHandle handle;  // valid as long as the operator is registered
  const c10::FunctionSchema* schema;
  size_t arguments;
  std::vector<bool> writes;                 // for each argument, whether the operator writes it
  std::optional<size_t> device, generator;  // indices of the arguments with a device and with a generator
  std::optional<size_t> weight;             // index of the weight, for operators by which layers of libtorch apply their weights
  bool from_libtorch;
  bool implicit_autograd;  // if the operator is a composite, autograd records the operators that it calls, and not the operator itself
  bool random;             // draws random numbers
  bool backward;           // is a backward operator, which needs its operands exactly as the forward operator saw them
  bool needs_values;       // its results, or their sizes, can't be known without the values of its operands
  bool views, elementwise;
  bool elementwise_lists;  // works on lists of tensors, and elementwise on each tensor
  // Set from operator_exceptions():
  bool inspects = false;          // its result describes this rank's values, but is not a local value
  bool writes_no_values = false;  // changes autograd metadata of a tensor, but no values
  bool recurrent = false;
  bool sets_storage = false;    // the set_ overload by which torch::load gives a tensor the memory that it has read
  bool rebinds = false;         // gives a tensor other memory
  bool compares_kinds = false;  // the first operator of set_data, which reads no values
  bool clones = false;
  bool updates_statistics = false;  // writes running statistics, although its schema says that it only reads them
  bool replaces = false;            // overwrites all values of its first argument
  bool transposes = false;          // transposes its argument, as torch::nn::Linear does with its weight

  // Indices of running_mean, which running_var follows, and of `training` in the arguments of all operators that update statistics.
  static constexpr size_t kRunningMean = 3, kTraining = 5;

  const std::string& name() const { return schema->name(); }
};

/// A fact that the schemas and tags of these operators do not tell.
struct OperatorException {
  bool OperatorFacts::*fact;
  std::vector<std::string_view> names;  // "name.overload", or "name" for all overloads of an operator
  std::string_view reason;
};
std::span<const OperatorException> operator_exceptions();

/// Returns the facts of an operator. Any thread may call it; it takes no lock.
const OperatorFacts& facts_of(const c10::OperatorHandle& handle);

/// Visits the defined tensors of an operator's arguments or results, which begin at `base`: visit(argument, element, tensor).
template <class Visit>
void for_each_operand(const Stack& stack, size_t base, Visit&& visit) {
  for (size_t i = base; i < stack.size(); i++) {
    const auto& value = stack[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(i - base, size_t{0}, value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      size_t element = 0;
      for (const auto& each : value.toListRef()) {
        if (each.isTensor() && each.toTensor().defined()) visit(i - base, element, each.toTensor());
        element++;
      }
    }
  }
}

/// Replaces the tensor in an argument, or each tensor in a list, by the result of `change` for it.
template <class Change>
void change_operands(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = change(tensor);
    value = std::move(tensors);
  }
}

/// Replaces a tensor in an argument or a result. Lists are copied.
void put_operand(c10::IValue& value, size_t element, at::Tensor tensor);

}  // namespace tessera
