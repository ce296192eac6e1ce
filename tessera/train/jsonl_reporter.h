// JsonlReporter: writes reports to a file of JSON lines: {"step":17,"loss":0.4123,"lr":0.02,"grad_norm":1.25}
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/base/fd.h"
#include "tessera/train/report.h"
#include "tessera/train/reporter.h"

namespace tessera::train {

/// Each report is a line. Numbers have enough digits to be read back exactly; infinities and NaN become null.
class JsonlReporter : public Reporter {
 public:
  explicit JsonlReporter(std::filesystem::path path, const ReporterOptions& options = {});
  void write(int64_t step, const Values& values) override;

 private:
  std::filesystem::path path_;
  Fd file_;  // open only on rank 0
};

}  // namespace tessera::train
