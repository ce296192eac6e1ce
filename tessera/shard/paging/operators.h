// What paging has to know of an operator. Names and schemas are looked into when it comes for the first time, and never again.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace tessera {

struct OperatorFacts {
  explicit OperatorFacts(const c10::OperatorHandle& handle);

  const c10::FunctionSchema* schema;  // lives as long as the operator
  size_t arguments;
  std::vector<bool> writes;  // which arguments it changes
  bool views;                // its first argument, and looks at no values
  bool elementwise;          // each value of its results comes from the values at one place of its operands
  bool random;               // its results depend on a generator
  bool inspects;             // autograd's own search for NaNs, which ends in an error or in nothing
  bool by_parts;             // made of other operators, which have facts of their own
  bool recurrent;
  bool sets_storage;    // set_ of a storage with a place in it, as torch::load does
  bool rebinds;         // puts other memory under a tensor
  bool compares_kinds;  // how set_data announces itself; reads no values
  bool clones;
  bool updates_statistics;  // which its schema says that it only reads
  bool backward;            // takes what its forward operator had, as it is

  const std::string& name() const { return schema->name(); }
};

/// From any thread, without a lock.
const OperatorFacts& facts_of(const c10::OperatorHandle& handle);

}  // namespace tessera
