// The base of a model that is trained only in part: all its frozen values, such as the weights to which adapters are added. Checkpoints of
// the run refer to the base instead of holding it.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "tessera/base/module_ref.h"

namespace tessera::checkpoint {

struct Base {
  std::string name;      // tells people where to find the base: a folder, or the name of a model
  std::string checksum;  // of the frozen values as they are in memory, quantized or not
  std::string forms;     // the forms of quantized weights: "nf4"
  std::set<std::string> parameters = {};
  uint64_t own = 0;  // checksum of the frozen values that this process holds, for expect_unchanged()
};

/// Returns the base of the model: all frozen values but those of adapters. Throws UsageError if nothing is frozen, or if tensors of the
/// model have no values yet. Collective if the model is sharded.
Base base_of(ConstModuleRef model, std::string name);
/// Throws UsageError if the frozen values that this process holds have changed since base_of(). Saves and loads with a base call this
/// function.
void expect_unchanged(ConstModuleRef model, const Base& base);

}  // namespace tessera::checkpoint
