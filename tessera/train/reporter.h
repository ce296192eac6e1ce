// Reporter: where the numbers of a run go.
#pragma once

#include <cstdint>

#include "tessera/train/value.h"

namespace tessera::train {

struct ReporterOptions {
  int64_t first_step = 0;  // of this run; reports of earlier steps are kept, those that an earlier run has made of later ones are dropped
  int rank = 0;            // only rank 0 writes
};

class Reporter {
 public:
  Reporter() = default;
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;
  virtual ~Reporter() = default;

  /// Steps come in ascending order, or it throws UsageError. A step may have several reports, also the one before the first. Only rank 0
  /// writes. What is written is in the file when it returns.
  virtual void write(int64_t step, const Values& values) = 0;
};

}  // namespace tessera::train
