// The step of a program as XLA devices that are not here would run it.
#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// Runs a program as so many replicas on no device until it has traced the same step again, ends it, and returns the step as StableHLO.
/// Throws Error with what the program has said if it ends before that.
std::string traced_step(const std::vector<std::string>& command, int replicas);

}  // namespace tessera::cli
