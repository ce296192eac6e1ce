// Counters of XLA devices: programs, executions, and reads and fallbacks that keep a step from being one program.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/xla/memory_figures.h"

namespace tessera::xla {

/// One of the compiled programs.
struct ProgramMetrics {
  size_t operations = 0;
  double seconds = 0;  // to compile it, or to load it
  bool from_disk = false;
  int64_t executions = 0;
  bool has_backward = false;  // whether a backward pass is in it
  /// In bytes for each replica.
  pjrt::MemoryFigures memory;
  /// By kind, such as "all-gather", as the compiler's optimizations left them; empty for one replica.
  std::map<std::string, pjrt::Collectives> collectives = {};
};

struct Metrics {
  std::vector<ProgramMetrics> programs;
  /// Operators of libtorch that were traced.
  int64_t operators = 0;
  int64_t executions = 0, compiles = 0, loaded_from_disk = 0, cache_hits = 0;
  /// Compiled programs that were dropped: a number in one has changed and is an argument of its successor, or it had not run for longest.
  int64_t dropped = 0;
  double seconds_compiling = 0;
  /// Seconds in the plugin's call that starts a program. A CPU plugin may run the program in it.
  double seconds_starting = 0;
  int64_t bytes_uploaded = 0, bytes_downloaded = 0;
  /// The peak of bytes in use on one device, where the plugin counts them: memory that was taken, not a compiler's estimate.
  std::optional<int64_t> peak_memory = {};
  /// How often a read by the host has cut a step in two, by reader, such as "item()".
  std::map<std::string, int64_t> host_reads;
  /// How often each operator without a lowering ran on the CPU, such as "aten::histc".
  std::map<std::string, int64_t> fallbacks;
};

/// Returns the counters up to the call. Throws UsageError before init().
Metrics metrics();

/// The metrics, and which operators ran on the CPU, a line for each.
std::string metrics_report();

}  // namespace tessera::xla
