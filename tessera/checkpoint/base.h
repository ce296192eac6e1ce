// The base of a model that is trained in part: all that is frozen, such as the model below adapters. Checkpoints of the run refer to it.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "tessera/base/module_ref.h"

namespace tessera::checkpoint {

struct Base {
  std::string name;      // where it comes from, for people
  std::string checksum;  // of its values, in the forms in which they are held
  std::string forms;     // the forms of quantized weights: "nf4"
  std::set<std::string> parameters = {};
  uint64_t own = 0;  // checksum of the part that this process holds, to notice later changes
};

/// Returns the base of the model as it is: all that is frozen, without adapters. Throws UsageError if nothing is frozen, or if tensors of
/// the model have no values yet. Collective if the model is sharded.
Base base_of(ConstModuleRef model, std::string name);
/// Throws UsageError if this process holds other values of the base than at base_of(), or another part of it. Saves and loads call it.
void expect_unchanged(ConstModuleRef model, const Base& base);

}  // namespace tessera::checkpoint
