// Runs a job from its first attempt to its last: starts the ranks, and starts them again after a failure.
#pragma once

#include "tessera/cli/launch/ending.h"
#include "tessera/cli/launch/plan.h"
#include "tessera/cli/output.h"

namespace tessera::cli {

/// Runs the job and returns how its last attempt ended on all nodes.
Ending run_attempts(const LaunchPlan& plan, Console& console);

}  // namespace tessera::cli
