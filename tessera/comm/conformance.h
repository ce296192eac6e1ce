// Checks that every transport must pass, with results that are equal to the bit. The test suite and `tessera test` run them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

struct ConformanceCheck {
  std::string operation;  // "all_gather"
  std::string what;       // "bfloat16, 13 elements a rank"
  /// Collective. Throws Error if the check fails.
  std::function<void(const Communicator& world)> run;
};

/// The checks that apply to a group of this kind and size.
std::vector<ConformanceCheck> conformance_checks(const Communicator& world);

}  // namespace tessera
