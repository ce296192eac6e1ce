// Writes the metrics of every step to a file of JSON lines: {"step":17,"loss":0.4123,"lr":0.02,"grad_norm":1.25}
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/base/fd.h"
#include "tessera/train/value.h"

namespace tessera::train {

struct MetricsOptions {
  int64_t first_step = 0;  // of this run; lines of earlier steps are kept, the rest of the file is removed
  int rank = 0;            // only rank 0 writes
};

/// Each line is in the file when write() returns. Numbers have as many digits as it takes to read them back exactly; infinities and NaN
/// become null.
class MetricsFile {
 public:
  explicit MetricsFile(std::filesystem::path path, const MetricsOptions& options = {});

  /// Steps must come in ascending order, or it throws UsageError. A step may have several lines.
  void write(int64_t step, const Values& values);

 private:
  std::filesystem::path path_;
  Fd file_;  // only on rank 0
  int64_t step_;
};

}  // namespace tessera::train
