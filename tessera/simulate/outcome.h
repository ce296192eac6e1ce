// Outcome: what a dry run has found out about the program's last step.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/comm/unit_figures.h"
#include "tessera/simulate/memory.h"

namespace tessera::simulate {

/// One use of a unit, from when it is entered to the next use.
struct UnitUse {
  std::string pass, unit;
  double begin = 0, computes = 0, waits = 0;  // seconds
  uint64_t sends = 0, memory = 0;             // bytes; the most memory that was in use
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(UnitUse, pass, unit, begin, computes, waits, sends, memory)

struct StepOutcome {
  std::vector<UnitUse> schedule;
  MemoryUse peak = {};
  std::string place;                                                              // where the peak was
  uint64_t gathered = 0, reduced = 0, across = 0;                                 // bytes that rank 0 sends; across: of both to other hosts
  double step = 0, compute = 0, communication = 0, exposed = 0, optimizer = 0;  // seconds
  double flops = 0;
};

struct Outcome {
  int ranks = 1, ranks_per_host = 1, steps = 0;
  std::string machine = {};
  std::vector<UnitFigures> units = {};
  StepOutcome last = {};                     // of the steps
  std::map<std::string, int> computed = {};  // operators whose values had to be computed

  std::string to_text() const;
  std::string to_json() const;
};

}  // namespace tessera::simulate
