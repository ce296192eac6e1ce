// A job from its first attempt to its last one: ranks are started, and after a failure started again.
#pragma once

#include "tessera/cli/launch/plan.h"
#include "tessera/cli/output.h"

namespace tessera::cli {

/// Returns the exit status.
int run_attempts(const LaunchPlan& plan, Console& console);

}  // namespace tessera::cli
