// What is frozen in a model that is trained in part, such as the model below adapters: checkpoints of the run refer to it.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "tessera/base/module_ref.h"

namespace tessera::checkpoint {

struct Base {
  std::string name;      // where it comes from, for people
  std::string checksum;  // of its values, as they are held
  std::string forms;     // in which weights are held: "nf4"
  std::set<std::string> parameters = {};
  uint64_t own = 0;  // a checksum of what this process holds of them: whether they have changed since
};

/// That of the model as it is now: what is frozen, but for adapters. Throws UsageError if nothing is, or has no values. Collective if the
/// model is sharded.
Base base_of(ConstModuleRef model, std::string name);
/// Throws UsageError if this process holds other values of it now, or another part of them. Saves and loads ask.
void expect_unchanged(ConstModuleRef model, const Base& base);

}  // namespace tessera::checkpoint
