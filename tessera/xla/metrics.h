// Counters of XLA devices: programs, executions, and reads and fallbacks that keep a step from being one program.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/xla/memory_figures.h"

namespace tessera::xla {

/// Counters of one compiled program.
struct ProgramMetrics {
  size_t operations = 0;
  double seconds = 0;  // the time that compiling it, or loading it from disk, took
  bool from_disk = false;
  int64_t executions = 0;
  bool has_backward = false;  // whether it contains operations of a backward pass
  /// In bytes for each replica.
  pjrt::MemoryFigures memory;
  /// The collectives of the optimized program by kind, such as "all-gather"; empty for one replica.
  std::map<std::string, pjrt::Collectives> collectives = {};
};

struct Metrics {
  std::vector<ProgramMetrics> programs;
  /// Operators of libtorch that were traced.
  int64_t operators = 0;
  int64_t executions = 0, compiles = 0, loaded_from_disk = 0, cache_hits = 0;
  /// How many compiled programs were dropped. A program is dropped if a number that is a constant in it changes (the next program takes
  /// that number as an argument), or if there are too many programs and this one has not run for the longest time.
  int64_t dropped = 0;
  double seconds_compiling = 0;
  /// Seconds spent in the plugin's call that starts a program. A CPU plugin may run the whole program in this call.
  double seconds_starting = 0;
  int64_t bytes_uploaded = 0, bytes_downloaded = 0;
  /// The most bytes that were in use on one device, as the plugin measured them; nothing if it does not measure.
  std::optional<int64_t> peak_memory = {};
  /// How often a read by the host split a step into two programs. Keys are the functions that read, such as "item()".
  std::map<std::string, int64_t> host_reads;
  /// How often each operator, such as "aten::histc", ran on the CPU because no lowering took the call.
  std::map<std::string, int64_t> fallbacks;
};

/// Returns the present values of the counters. Throws UsageError before init().
Metrics metrics();

/// Returns the counters as text: totals, then a line for each operator that ran on the CPU, each read that split a step, and each program.
std::string metrics_report();

}  // namespace tessera::xla
