// MlFlowReporter: writes reports as a run of MLflow, in the folders of its file store (mlruns).
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/train/reporter.h"

namespace tessera::train {

/// The run is in the experiment Default and is called as the program. A job that is resumed writes another run. In names, characters that
/// MLflow refuses become '_'.
class MlFlowReporter : public Reporter {
 public:
  explicit MlFlowReporter(const std::filesystem::path& store, const ReporterOptions& options = {});
  ~MlFlowReporter() override;  // marks the run as finished, or as failed if an exception destroys the object
  void write(int64_t step, const Values& values) override;

 private:
  enum class Status { Running = 1, Finished = 3, Failed = 4 };  // MLflow's numbers
  void write_meta(Status status) const;

  std::filesystem::path run_;  // the folder of the run; empty on other ranks than 0
  int64_t started_ = 0;        // in milliseconds, as all times of MLflow
  int exceptions_ = 0;
};

}  // namespace tessera::train
