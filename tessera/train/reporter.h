// Reporter: the interface by which the numbers of a run are written.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tessera/train/value.h"

namespace tessera::train {

struct ReporterOptions {
  /// The first step of this run. Of an earlier run's reports, the first one of this or a later step and all reports after it are dropped.
  int64_t first_step = 0;
  /// The same for values whose reports count something other than steps, such as epochs: the first count, by the name of the value.
  std::map<std::string, int64_t> first_of = {};
  int rank = 0;            // only rank 0 writes
};

class Reporter {
 public:
  Reporter() = default;
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;
  virtual ~Reporter() = default;

  /// Writes a report. A step may have several, and steps come in any order, because values may count different things: steps and epochs. Only
  /// rank 0 writes. The report is in the file when the function returns.
  virtual void write(int64_t step, const Values& values) = 0;
};

}  // namespace tessera::train
