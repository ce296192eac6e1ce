// What `tessera report --json` prints and its page draws.
#pragma once

#include "tessera/cli/report/analysis.h"

namespace tessera::cli {

/// The data of a run. Curves have at most about 600 points, and pictures a part of the ranks, with those of interest among them.
nlohmann::json report_data(const RecordedRun& run);

}  // namespace tessera::cli
