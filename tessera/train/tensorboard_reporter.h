// TensorBoardReporter: writes reports to event files of TensorBoard, in a folder of their own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "tessera/base/fd.h"
#include "tessera/train/report.h"
#include "tessera/train/reporter.h"

namespace tessera::train {

/// Each value is a scalar whose tag is its name, with the precision of a float, as in TensorBoard. Each run adds a file to the folder. The
/// file first tells TensorBoard to drop the values that earlier files have for first_step and later steps.
class TensorBoardReporter : public Reporter {
 public:
  explicit TensorBoardReporter(std::filesystem::path folder, const ReporterOptions& options = {});
  void write(int64_t step, const Values& values) override;

 private:
  void write_event(int64_t step, const std::string& what);

  std::filesystem::path path_;
  Fd file_;  // open only on rank 0
};

}  // namespace tessera::train
