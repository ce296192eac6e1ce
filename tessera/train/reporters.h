// Reporters by the names of files: what a flag such as --metrics takes.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/train/reporter.h"

namespace tessera::train {

enum class ReportFormat {
  Jsonl,        // FILE.jsonl
  Csv,          // FILE.csv
  TensorBoard,  // a folder: one that is there, or a name without an ending or with a slash at its end
};

/// The format that a name stands for. Throws ConfigError if it stands for none.
ReportFormat report_format(const std::string& path);

std::unique_ptr<Reporter> make_reporter(const std::string& path, const ReporterOptions& options = {});

/// Several reporters as one. Without any, nothing is written.
class Reporters : public Reporter {
 public:
  Reporters(const std::vector<std::string>& paths, const ReporterOptions& options = {});
  void write(int64_t step, const Values& values) override;

 private:
  std::vector<std::unique_ptr<Reporter>> all_;
};

}  // namespace tessera::train
