// The numbers of every step in a file, for programs to read: {"step":17,"loss":0.4123,"lr":0.02,"grad_norm":1.25}, one line a step.
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/base/fd.h"
#include "tessera/train/value.h"

namespace tessera::train {

struct MetricsOptions {
  int64_t first_step = 0;  // of this run; what an earlier run wrote before it stays, the rest of the file goes
  int rank = 0;            // only rank 0 writes
};

/// Each line is in the file when write() returns. Numbers are as short as can be read back the same; what is not finite is null.
class MetricsFile {
 public:
  explicit MetricsFile(std::filesystem::path path, const MetricsOptions& options = {});

  /// Steps come in order; one step may have several lines.
  void write(int64_t step, const Values& values);

 private:
  std::filesystem::path path_;
  Fd file_;  // none on other ranks
  int64_t step_;
};

}  // namespace tessera::train
