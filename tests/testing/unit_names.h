// The names of a model's units, for tests of which units were made.
#pragma once

#include <string>
#include <vector>

#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera::testing {

/// Returns the names in the order of the model.
inline std::vector<std::string> unit_names(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& unit : units(model)) names.push_back(unit->name());
  return names;
}

}  // namespace tessera::testing
