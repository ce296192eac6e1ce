// The files of a recorded run as plain values, and the traces of its ranks merged into one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/unit_figures.h"

namespace tessera::cli::reports {

/// Bytes by kind, such as "process" or "unsharded".
using MemoryKinds = std::map<std::string, double>;

/// A line of rank-R.jsonl: sums over some steps.
struct RankLine {
  double time = 0, seconds = 0, compute = 0, unshard = 0, reduce = 0, optimizer = 0, other = 0;
  int64_t step = 0, steps = 0;
  double gathers = 0, misses = 0, cancelled = 0;
  std::string host, place;
  MemoryKinds memory;

  double waits() const { return unshard + reduce; }
  double work() const { return compute + other; }  // for which other ranks may wait
  double per_step(double value) const { return steps > 0 ? value / static_cast<double>(steps) : 0; }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(RankLine, time, seconds, compute, unshard, reduce, optimizer, other, step, steps, gathers,
                                                misses, cancelled, host, place, memory)

/// An "X" event of a trace; times are in seconds since the run started.
struct TraceEvent {
  double begin = 0, end = 0;
  std::string category, name, unit, operation, group, key;  // the key is equal in the events of all ranks of one collective
  double ready = 0;                                         // when the last rank began this collective
  int last = -1;                                            // which one
};

struct RecordedRank {
  std::string host;
  std::vector<RankLine> lines;
  std::vector<TraceEvent> events;  // in the order of their begins
  std::vector<std::pair<double, MemoryKinds>> memory;
};

struct RecordedRun {
  std::filesystem::path folder;
  nlohmann::json facts;  // run.json
  std::vector<UnitFigures> units;
  std::vector<RecordedRank> ranks;                                         // one for each rank of the world
  std::map<std::string, std::vector<std::pair<int64_t, double>>> metrics;  // steps and values; NaN where a value was not finite
  std::map<std::string, double> moved;                                     // by how many seconds the clocks of hosts were moved
  std::vector<std::string> notes;

  int world() const { return static_cast<int>(ranks.size()); }
  /// Whether the clock of the host, which writes the record, tells for how long ranks compute.
  bool is_timed() const { return facts.value("device", "cpu") == "cpu"; }
};

/// How much of a run is read: all of it or, for a live view, the ends of its files without traces.
enum class Extent { Whole, Ends };

/// Reads all that is whole, and notes what is not. Moves the clocks of hosts so that collectives end at the same time on all of them.
/// Throws ConfigError if the folder is not that of a run.
RecordedRun read_run(const std::filesystem::path& folder, Extent extent = Extent::Whole);

/// Writes RUN/trace.json, the traces of all ranks with their clocks moved. Returns its path, or nothing if no rank has a trace.
std::optional<std::filesystem::path> write_merged_trace(const RecordedRun& run);

}  // namespace tessera::cli::reports
