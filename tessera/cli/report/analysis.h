// Analyses a recorded run: sums per rank, the cost of each unit, who waited for whom, and advice with its evidence.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "tessera/cli/report/run_files.h"
#include "tessera/shard/advice.h"

namespace tessera::cli::reports {

/// The cost of a unit in a step, in seconds, as a mean over the ranks that have whole steps in their traces.
struct UnitCost {
  double gathers = 0, transfer = 0;  // all-gathers, and how long they took once all ranks had begun them
  double compute = 0, waits = 0;     // waits: of the program, for parameters and for gradients
  double transfer_waits = 0;         // of them, those for gathers that all ranks had begun
  double late_waits = 0;             // of these, those for gathers that began no earlier than the wait
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(UnitCost, gathers, transfer, compute, waits, transfer_waits, late_waits)

struct Analysis {
  std::vector<RankLine> ranks;              // the mean step of each, the number of steps, and the most memory
  double step_seconds = 0;                  // of the median rank
  int64_t steps = 0;                        // the last step of all ranks
  double mfu = 0;                           // 0 if unknown
  int peak_rank = 0;                        // whose process was largest
  double peak_bytes = 0;                    // of that process
  std::string untimed;                      // why no advice is given from times; empty if some may be
  double forwards = 0;                      // forward passes in a step; 0 without traces
  std::vector<UnitCost> units;              // as in RecordedRun
  std::string waits_from;                   // "trace" or "lines"; empty if nothing is known
  double watched = 0;                       // for how many seconds
  std::vector<std::vector<double>> waited;  // waited[r][s]: for how many seconds rank r waited for rank s
};

Analysis analysed(const RecordedRun& run);
/// Returns nothing for a run with which all is well.
std::vector<Advice> advice_for(const RecordedRun& run, const Analysis& all);

/// Whole steps of a trace.
struct StepWindow {
  double begin = 0, end = 0;
  int steps = 0;
};
/// The last `most` of them.
StepWindow last_steps(const std::vector<TraceEvent>& events, int most = std::numeric_limits<int>::max());

}  // namespace tessera::cli::reports
