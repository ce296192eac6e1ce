// What XLA devices have done.
#pragma once

#include <cstdint>

#include "tessera/xla/memory_figures.h"

namespace tessera::xla {

/// Since the device was made.
struct Metrics {
  int64_t executions = 0, compiles = 0, loaded_from_disk = 0, cache_hits = 0;
  double seconds_compiling = 0;
  int64_t bytes_uploaded = 0, bytes_downloaded = 0;
  /// Of the program that ran last, in bytes for each replica.
  pjrt::MemoryFigures memory;
};

const Metrics& metrics();

}  // namespace tessera::xla
