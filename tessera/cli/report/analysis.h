// What a recorded run says about itself: sums per rank, what each unit costs, who waited for whom, and advice with its evidence.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "tessera/cli/report/run_files.h"

namespace tessera::cli::reports {

/// What a unit costs in a step, in seconds and bytes, as a mean over the ranks that have whole steps in their traces.
struct UnitCost {
  double gathers = 0, transfer = 0, bytes = 0;  // all-gathers, and how long they took once all ranks had begun them
  double compute = 0, unshard_wait = 0, reduce_wait = 0;
  double transfer_wait = 0,
         late_wait = 0;  // waits for gathers that all ranks had begun; those of gathers that began no earlier than the wait
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(UnitCost, gathers, transfer, bytes, compute, unshard_wait, reduce_wait, transfer_wait, late_wait)

struct Advice {
  std::string name, title, evidence, remedy;
  std::vector<int> ranks{};
  std::vector<std::string> units{};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Advice, name, title, evidence, remedy, ranks, units)

/// Whole steps of a trace.
struct StepWindow {
  double begin = 0, end = 0;
  int steps = 0;
};

struct Analysis {
  std::vector<RankLine> totals;             // of each rank; without its first line, which has the start, where there are others
  double step_seconds = 0;                  // of the median rank
  int64_t steps = 0;                        // the last step of all ranks
  double mfu = 0;                           // 0 if unknown
  int peak_rank = 0;                        // whose process was largest
  double forwards = 0;                      // forward passes in a step; 0 without traces
  std::vector<UnitCost> units;              // as in RecordedRun
  std::string waits_from;                   // "trace" or "lines"; empty if nothing is known
  double watched = 0;                       // for how many seconds
  std::vector<std::vector<double>> waited;  // waited[r][s]: for how many seconds rank r waited for rank s

  double waits_for(int rank) const;
};

Analysis analysed(const RecordedRun& run);
/// Returns nothing for a run with which all is well.
std::vector<Advice> advice_for(const RecordedRun& run, const Analysis& all);

/// The data of a run, which `tessera report --json` prints and its page draws. Curves have at most about 600 points, and pictures a part of
/// the ranks.
nlohmann::json data_of(const RecordedRun& run);

/// The last `most` whole steps of a trace.
StepWindow last_steps(const std::vector<TraceEvent>& events, int most = std::numeric_limits<int>::max());
/// The value in the middle; of an even number of values the lower one of the two. 0 if there is none.
double middle_value(std::vector<double> values);

}  // namespace tessera::cli::reports
