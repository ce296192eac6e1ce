// The operators of the device, by the files that have them. Each file has a table of operators and what they are in the graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// All of them, and the fallback for the others.
void register_kernels();

/// Which operators have a lowering, in the order of their names.
std::vector<std::string> lowered_operators();

/// A call of an operator: its arguments, and where its results go.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  size_t arguments() const { return arguments_.size(); }
  const c10::IValue& operator[](size_t i) const { return arguments_[i]; }
  /// Defined, or the argument is None.
  bool has(size_t i) const { return !arguments_[i].isNone() && !(arguments_[i].isTensor() && !arguments_[i].toTensor().defined()); }
  const at::Tensor& tensor(size_t i) const { return arguments_[i].toTensor(); }
  double number(size_t i) const { return arguments_[i].toScalar().toDouble(); }
  int64_t integer(size_t i) const { return arguments_[i].toInt(); }
  bool flag(size_t i) const { return arguments_[i].toBool(); }
  /// A list of integers, or nothing if it is None.
  Sizes integers(size_t i) const;

  Value value(size_t i) const;
  /// In another type.
  Value value(size_t i, at::ScalarType element) const;

  /// The tensor that takes result `i`, if the caller gave one.
  const at::Tensor* out(size_t i = 0) const { return i < outs_.size() ? &outs_[i] : nullptr; }
  /// The type that result `i` shall have, as libtorch has found out where it gave a tensor for it.
  at::ScalarType result_type(size_t i = 0) const;

  /// Writes the results into the tensors that the caller gave, which get their shapes, or makes new ones.
  void give(std::span<const Value> results);
  void give(const Value& result) { give(std::span(&result, 1)); }

  std::string_view name() const { return name_; }

 private:
  std::string_view name_;
  std::vector<c10::IValue> arguments_;
  std::vector<at::Tensor> outs_;
  torch::jit::Stack& stack_;
  size_t returns_;
};

using Lowering = void (*)(Call&);
struct Kernel {
  const char* name;
  Lowering lower;
};
/// Registers a table; names are those of ATen's operators with their overloads: "exp.out".
void add_kernels(std::span<const Kernel> kernels);

void register_plumbing();
void register_elementwise();
void register_reductions();
void register_products();
void register_convolutions();
void register_random();
void register_indexing();
void register_fallback();

/// How often an operator that has no lowering ran on the CPU.
struct Fallback {
  std::string name;
  int64_t calls = 0;
};
std::vector<Fallback> fallbacks();

}  // namespace tessera::xla
