// The base of a model that is trained only in part: all its frozen values, such as the model below adapters. Checkpoints of the run refer
// to the base instead of holding it.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "tessera/base/module_ref.h"

namespace tessera::checkpoint {

struct Base {
  std::string name;      // for people: where to find it, such as a folder or the name of a model
  std::string checksum;  // of the values as they are in memory, quantized or not
  std::string forms;     // the forms of quantized weights: "nf4"
  std::set<std::string> parameters = {};
  uint64_t own = 0;  // checksum of the part that this process holds, to notice later changes
};

/// Returns the base of the model as it is: all that is frozen, without adapters. Throws UsageError if nothing is frozen, or if tensors of
/// the model have no values yet. Collective if the model is sharded.
Base base_of(ConstModuleRef model, std::string name);
/// Throws UsageError if the frozen values that this process holds are not those at the call of base_of(). Saves and loads call it.
void expect_unchanged(ConstModuleRef model, const Base& base);

}  // namespace tessera::checkpoint
