// The operators of the device, by the files that have them. Each file has a table of operators and what they are in the graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// All of them, and the fallback for the others.
void register_kernels();

/// What an operator's schema says of its arguments.
struct Signature {
  explicit Signature(const c10::FunctionSchema& schema);
  std::string name;
  size_t arguments, inputs, returns;  // inputs are all but those that are there only to be written
  std::vector<size_t> outs;           // which arguments take the results
  std::vector<size_t> numbers;        // which results are numbers, that the operator's own gradient alone would take
  uint64_t counted = 0;               // bits of the inputs that decide the result, so that a lowering has to read them
  std::vector<c10::IValue> defaults;  // of the arguments; None where there is no default
  std::optional<size_t> dtype;        // the argument that says what type the result shall have
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
  /// An argument of which the result does not depend by this look alone: at its shape, or at what it is.
  const c10::IValue& peek(size_t i) const { return arguments_[i]; }
  /// Defined, or the argument is None.
  bool has(size_t i) const { return !arguments_[i].isNone() && !(arguments_[i].isTensor() && !arguments_[i].toTensor().defined()); }
  const at::Tensor& tensor(size_t i) const { return (*this)[i].toTensor(); }
  double number(size_t i) const { return (*this)[i].toScalar().toDouble(); }
  /// The whole number 1, as a factor is that nobody has given: a schedule's is a fraction, also where it becomes 1.
  bool is_one(size_t i) const { return (*this)[i].isInt() && arguments_[i].toInt() == 1; }
  int64_t integer(size_t i) const { return (*this)[i].toInt(); }
  bool flag(size_t i) const { return (*this)[i].toBool(); }
  /// A list of integers, or nothing if it is None.
  Sizes integers(size_t i) const;

  Value value(size_t i) const;
  /// In another type.
  Value value(size_t i, at::ScalarType element) const;

  /// In the type of the result; half types are computed as float, as libtorch does.
  Value wide_value(size_t i) const;

  /// The tensor that takes result `i`, if the caller gave one.
  const at::Tensor* out(size_t i = 0) const { return i < outs_.size() ? &outs_[i] : nullptr; }
  /// The type that result `i` shall have, as libtorch has found out where it gave a tensor for it.
  at::ScalarType result_type(size_t i = 0) const;

  /// Writes the results into the tensors that the caller gave, or makes new ones. A tensor that is there only to be written gets the
  /// result's shape; one that is changed in place has it already, or the call is an error. Throws NotLowered if the lowering has not read
  /// an argument that is given and decides the result.
  void give(std::span<const Value> results);
  void give(const Value& result) { give(std::span(&result, 1)); }

  /// Of values that no lowering computes: complex numbers.
  bool is_foreign() const;
  /// Puts the arguments back, as if there had been no call.
  void undo();

 private:
  bool is_given(size_t i) const { return has(i) && (signature_.defaults[i].isNone() || signature_.defaults[i] != arguments_[i]); }

  const Signature& signature_;
  torch::jit::Stack& stack_;
  std::vector<c10::IValue> arguments_;
  mutable uint64_t read_ = 0;  // bits of the arguments
  std::vector<at::Tensor> outs_;
};

/// What a lowering throws at arguments that it does not take: the call then runs on the CPU.
struct NotLowered {};

using Lowering = std::function<void(Call&)>;
struct Kernel {
  const char* name;
  Lowering lower;
};
/// Registers a table. A name is an operator of ATen with its overload, as "scatter.src", and means all its forms with the same arguments,
/// such as those in place and with a given result, of which libtorch has no composition. If there is none such, it is the operator itself.
void add_kernels(std::span<const Kernel> kernels);
/// The schemas of all operators that have a lowering.
std::span<const c10::FunctionSchema> lowered_schemas();

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
