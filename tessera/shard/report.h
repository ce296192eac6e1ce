// Reports on the units of a model: their sizes, their memory and their communication.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/base/module_ref.h"

namespace tessera {

/// The costs of a model on this rank since the last reset.
struct ModelCounters {
  uint64_t gathers = 0;
  uint64_t reductions = 0;
  uint64_t gathered_bytes = 0;  // received from other ranks
  uint64_t peak_unsharded_bytes = 0;
  uint64_t misses = 0;     // uses that the learned order did not predict
  uint64_t cancelled = 0;  // units that were unsharded early and resharded before they were used
};
ModelCounters counters(ConstModuleRef module);
void reset_counters(ModuleRef module);

/// A table of the units with their sizes and counters, indented as their modules nest; then advice (advice.h) with the lines to change, if
/// another division would save much. For people to read; the format may change.
std::string describe(ConstModuleRef module);

}  // namespace tessera
