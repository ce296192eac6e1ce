#include "tessera/comm/operation.h"

namespace tessera {

std::string_view name(Operation operation) {
  static constexpr std::string_view kNames[kOperations] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier",
                                                           "split",      "share",          "compare",    "texts"};
  return kNames[static_cast<size_t>(operation)];
}

std::string_view name(Reduce op) {
  static constexpr std::string_view kNames[] = {"sum", "mean", "min", "max"};
  return kNames[static_cast<size_t>(op)];
}

}  // namespace tessera
