#include "tessera/train/reporters.h"

#include <filesystem>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/train/csv_reporter.h"
#include "tessera/train/jsonl_reporter.h"
#include "tessera/train/tensorboard_reporter.h"

namespace tessera::train {

ReportFormat report_format(const std::string& path) {
  const std::filesystem::path place = path;
  const auto ending = place.extension().string();
  if (ending == ".jsonl") return ReportFormat::Jsonl;
  if (ending == ".csv") return ReportFormat::Csv;
  std::error_code unknown;
  const bool is_there = std::filesystem::exists(place, unknown);
  const bool may_be_folder = !path.empty() && (ending.empty() || path.ends_with('/'));
  if (is_there ? std::filesystem::is_directory(place, unknown) : may_be_folder) return ReportFormat::TensorBoard;
  throw ConfigError(
      "'{}' does not say what metrics are written as: FILE.jsonl for lines of JSON, FILE.csv for a table, FOLDER/ for TensorBoard", path);
}

std::unique_ptr<Reporter> make_reporter(const std::string& path, const ReporterOptions& options) {
  switch (report_format(path)) {
    case ReportFormat::Jsonl:
      return std::make_unique<JsonlReporter>(path, options);
    case ReportFormat::Csv:
      return std::make_unique<CsvReporter>(path, options);
    case ReportFormat::TensorBoard:
      break;
  }
  return std::make_unique<TensorBoardReporter>(path, options);
}

Reporters::Reporters(const std::vector<std::string>& paths, const ReporterOptions& options) {
  for (const auto& path : paths) all_.push_back(make_reporter(path, options));
}

void Reporters::write(int64_t step, const Values& values) {
  for (const auto& reporter : all_) reporter->write(step, values);
}

}  // namespace tessera::train
