// What XLA devices have done since they were made: programs, executions, and what keeps a step from being one program.
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
  /// Of a program of several replicas, as its compiler has left them.
  std::map<std::string, pjrt::Collectives> collectives = {};
};

struct Metrics {
  std::vector<ProgramMetrics> programs;
  /// Operators of libtorch that were noted.
  int64_t operators = 0;
  int64_t executions = 0, compiles = 0, loaded_from_disk = 0, cache_hits = 0;
  /// Programs that are not there any more: a number in them has moved and is an argument of another, or others have run for long.
  int64_t dropped = 0;
  double seconds_compiling = 0;
  /// In the plugin's call that starts a program. A CPU plugin may run the program in it.
  double seconds_starting = 0;
  int64_t bytes_uploaded = 0, bytes_downloaded = 0;
  /// The most bytes of a device that were in use at once, where the plugin counts them: it knows what programs took, and not just need.
  std::optional<int64_t> peak_memory = {};
  /// How often a value that the host reads has cut a step in two, by what reads it: "item()".
  std::map<std::string, int64_t> host_reads;
  /// How often each operator that has no lowering ran on the CPU: "aten::histc".
  std::map<std::string, int64_t> fallbacks;
};

/// As they are now.
Metrics metrics();

/// The metrics, and which operators ran on the CPU, a line for each.
std::string metrics_report();

}  // namespace tessera::xla
