// Operators of the device. Each file of lowerings registers a table of operators and the functions that lower them to the graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/xla/graph/ops.h"

namespace tessera::xla {

/// Registers all tables, and the fallback for other operators.
void register_kernels();

/// Facts about an operator's arguments, from its schema.
struct Signature {
  explicit Signature(const c10::FunctionSchema& schema);
  std::string name;
  size_t arguments, inputs, returns;  // counts; inputs are the arguments that are not `out` arguments
  std::vector<size_t> outs;           // indices of the arguments that take the results
  std::vector<size_t> numbers;        // indices of the results that are integers, which only the operator's own backward takes
  uint64_t counted = 0;               // bit i is set if a lowering has to read input i, because it decides the result
  std::vector<c10::IValue> defaults;  // default values of the arguments; None for an argument without a default
  std::optional<size_t> dtype;        // the index of the argument that says the type of the result
};

/// A call of an operator: its arguments, and where its results go.
class Call {
 public:
  Call(const Signature& signature, torch::jit::Stack& stack);

  size_t arguments() const { return signature_.inputs; }
  const c10::IValue& operator[](size_t i) const {
    read_ |= uint64_t{1} << i;
    return arguments_[i];
  }
  /// Returns an argument without marking it as read, so that a lowering can look at its shape or its kind.
  const c10::IValue& peek(size_t i) const { return arguments_[i]; }
  /// Whether the caller gave the argument: it is neither None nor an undefined tensor.
  bool has(size_t i) const { return !arguments_[i].isNone() && !(arguments_[i].isTensor() && !arguments_[i].toTensor().defined()); }
  const at::Tensor& tensor(size_t i) const { return (*this)[i].toTensor(); }
  double number(size_t i) const { return (*this)[i].toScalar().toDouble(); }
  /// Whether a factor, such as alpha, is the integer 1, which is its default. A factor that a schedule computes is a double even if it is
  /// 1, and stays an argument of the program.
  bool is_one(size_t i) const { return (*this)[i].isInt() && arguments_[i].toInt() == 1; }
  int64_t integer(size_t i) const { return (*this)[i].toInt(); }
  bool flag(size_t i) const { return (*this)[i].toBool(); }
  /// Returns an argument that is a list of integers or one integer; an empty list if it is None.
  Sizes integers(size_t i) const;

  Value value(size_t i) const;
  /// Returns an argument in another type.
  Value value(size_t i, at::ScalarType element) const;

  /// Returns an argument in the type of the result. If that is a half type, returns the argument as float, because libtorch computes half
  /// types as float.
  Value wide_value(size_t i) const;

  /// The tensor that takes result `i`, or null if the caller gave none.
  const at::Tensor* out(size_t i = 0) const { return i < outs_.size() ? &outs_[i] : nullptr; }
  /// The type of result `i`: that of the tensor that the caller gave for it, otherwise that of the first tensor among the arguments.
  at::ScalarType result_type(size_t i = 0) const;

  /// Writes the results into the tensors that the caller gave, or makes new ones. An `out` tensor gets the result's shape; a tensor that is
  /// changed in place must have this shape already. Throws NotLowered if the lowering did not read an argument that is given and decides the
  /// result.
  void give(std::span<const Value> results);
  void give(const Value& result) { give(std::span(&result, 1)); }
  void give(std::initializer_list<Value> results) { give(std::span(results.begin(), results.size())); }
  /// Converts the results to `type`, and gives them. Undefined results stay undefined.
  void give_as(at::ScalarType type, std::vector<Value> results);
  void give_rounded(const Value& result) { give(hlo::convert(result, result_type())); }

  /// Whether an argument is a complex tensor, which no lowering takes.
  bool is_foreign() const;
  /// Puts the arguments back on the stack.
  void undo();

 private:
  bool is_given(size_t i) const { return has(i) && (signature_.defaults[i].isNone() || signature_.defaults[i] != arguments_[i]); }

  const Signature& signature_;
  torch::jit::Stack& stack_;
  std::vector<c10::IValue> arguments_;
  mutable uint64_t read_ = 0;  // bit i is set if argument i was read
  std::vector<at::Tensor> outs_;
};

/// Thrown by a lowering for arguments that it does not take; the call then runs on the CPU.
struct NotLowered {};

using Lowering = std::function<void(Call&)>;
struct Kernel {
  std::string names;  // operators that are lowered alike, separated by spaces
  Lowering lower;
};
/// Registers a table. A name is an ATen operator with its overload, such as "scatter.src". Its kernel is registered for all forms of the
/// operator with the same arguments, such as in-place and `out` forms, except those that libtorch composes of other operators. If this
/// leaves no form, the kernel is registered for the operator itself.
void add_kernels(std::span<const Kernel> kernels);
inline void add_kernels(std::initializer_list<Kernel> kernels) {
  add_kernels(std::span(kernels.begin(), kernels.size()));
}
/// Returns the schemas of all operators that have a lowering.
std::span<const c10::FunctionSchema> lowered_schemas();

/// Returns a library that registers kernels of a namespace's operators under a dispatch key. It lives as long as the process.
torch::Library& library_of(const char* operators, c10::DispatchKey key);

void register_plumbing();
void register_elementwise();
void register_activations();
void register_reductions();
void register_losses();
void register_norms();
void register_products();
void register_attention();
void register_convolutions();
void register_pooling();
void register_resampling();
void register_recurrent();
void register_random();
void register_indexing();
void register_ordering();
void register_makers();
void register_ctc_loss();
void register_bags();
void register_compositions();
void register_autocast();
void register_fallback();
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::xla
