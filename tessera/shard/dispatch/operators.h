// What paging has to know about an operator. It is found out from the operator's name and schema once, at its first use.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera {

struct OperatorFacts {
  explicit OperatorFacts(const c10::OperatorHandle& handle);

  const c10::FunctionSchema* schema;  // valid as long as the operator is registered
  size_t arguments;
  std::vector<bool> writes;  // for each argument, whether the operator writes it
  bool views;                // returns views of its first argument and reads no values
  bool elementwise;          // each result value depends only on the operand values at the same position
  bool random;               // draws random numbers
  bool inspects;             // aten::_is_any_true, by which autograd's anomaly mode looks for NaNs; its result is not a local value
  bool composite;            // made of other operators, also for autograd
  bool marks;                // changes what a tensor is to autograd, but no values
  bool by_parts;             // has no CPU kernel: it calls other operators, and paging sees these
  bool recurrent;            // lstm, gru or rnn
  bool sets_storage;         // the set_ overload by which torch::load gives a tensor the memory that it has read
  bool rebinds;              // gives a tensor other memory
  bool compares_kinds;       // the first operator of set_data, which reads no values
  bool clones;
  bool updates_statistics;  // writes running statistics, although its schema says that it only reads them
  // Places of running_mean, before running_var, and of `training` among the operands of all operators that update statistics.
  static constexpr size_t kRunningMean = 3, kTraining = 5;
  bool backward;  // expects its operands exactly as the forward operator saw them
  // For deferred tensors:
  bool composed;                            // calls other operators for all that it does
  bool needs_values;                        // its results, or their sizes, can't be known without the values of its operands
  bool replaces;                            // gives every value of its first argument a new one
  std::optional<size_t> device, generator;  // places of these arguments

  const std::string& name() const { return schema->name(); }
};

/// May be called from any thread; takes no lock.
const OperatorFacts& facts_of(const c10::OperatorHandle& handle);

}  // namespace tessera
