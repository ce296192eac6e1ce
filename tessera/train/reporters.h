// Makes reporters from the names that flags such as --metrics take.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/train/reporter.h"

namespace tessera::train {

enum class ReportFormat {
  Jsonl,        // FILE.jsonl
  MlFlow,       // mlflow:FOLDER, or mlflow for the folder mlruns
  Prometheus,   // prometheus:PORT
  TensorBoard,  // a folder that exists, or a name that has no ending or ends in a slash
};

/// Returns the format for a name. Throws ConfigError if the name does not tell a format.
ReportFormat report_format(const std::string& name);

/// Throws ConfigError if another process has a port among the names.
void expect_free_ports(const std::vector<std::string>& names);

std::unique_ptr<Reporter> make_reporter(const std::string& name, const ReporterOptions& options = {});

/// Writes to several reporters, or to none; and in a run that is recorded, to metrics.jsonl of the record. A run that begins anew keeps the
/// lines of an earlier attempt as metrics-1.jsonl and so on.
class Reporters : public Reporter {
 public:
  Reporters(const std::vector<std::string>& names, const ReporterOptions& options = {});
  void write(int64_t step, const Values& values) override;

 private:
  std::vector<std::unique_ptr<Reporter>> all_;
};

}  // namespace tessera::train
