// Reporter: the interface by which the numbers of a run are written.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tessera/train/value.h"

namespace tessera::train {

struct ReporterOptions {
  /// The first step of this run: reports of an earlier run are kept up to the first one of this step or a later one.
  int64_t first_step = 0;
  /// The same for values that are logged by another count, such as epochs, by the names of the values.
  std::map<std::string, int64_t> first_of = {};
  int rank = 0;            // only rank 0 writes
};

class Reporter {
 public:
  Reporter() = default;
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;
  virtual ~Reporter() = default;

  /// A step may have several reports, and steps come in any order, because values may count different things: steps and epochs. Only rank
  /// 0 writes. What is written is in the file when it returns.
  virtual void write(int64_t step, const Values& values) = 0;
};

}  // namespace tessera::train
