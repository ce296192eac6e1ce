// What every transport must do, alike to the bit. The test suite and `tessera test` run the same checks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

struct ConformanceCheck {
  std::string operation;  // "all_gather"
  std::string what;       // "bfloat16, 13 elements a rank"
  /// Collective; throws Error where the transport does not keep its promise.
  std::function<void(const Communicator& world)> run;
};

/// All checks that make sense for a group of this kind and size.
std::vector<ConformanceCheck> conformance_checks(const Communicator& world);

}  // namespace tessera
