// What is frozen in a model that is trained in part, such as the model below adapters: checkpoints of the run refer to it.
#pragma once

#include <set>
#include <string>

#include "tessera/base/module_ref.h"

namespace tessera {
struct LocalValues;
}

namespace tessera::checkpoint {

struct Base {
  std::string name;      // where it comes from, for people
  std::string checksum;  // of its values, as they are held
};

/// That of the model as it is now. Throws UsageError if nothing is frozen, or has no values. Collective if the model is sharded.
Base base_of(ConstModuleRef model, std::string name);

/// The names of its parameters, of a model with these values.
std::set<std::string> names_of_base(ConstModuleRef model, const LocalValues& values);

}  // namespace tessera::checkpoint
