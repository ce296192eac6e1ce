#include "tessera/train/reporters.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/run_folder.h"
#include "tessera/base/words.h"
#include "tessera/train/jsonl_reporter.h"
#include "tessera/train/mlflow_reporter.h"
#include "tessera/train/prometheus_reporter.h"
#include "tessera/train/tensorboard_reporter.h"

namespace tessera::train {
namespace {

constexpr std::string_view kMlFlow = "mlflow:", kPrometheus = "prometheus:";

/// Returns the port of prometheus:PORT; nothing if it is not one.
std::optional<int> port_in(std::string_view name) {
  const auto port = number_of<int>(name.substr(kPrometheus.size()));
  return port && *port > 0 && *port < 65536 ? port : std::nullopt;
}

/// The file of the record. A program trains on if it can't be written.
class RecordReporter : public Reporter {
 public:
  RecordReporter(const std::filesystem::path& path, const ReporterOptions& options) {
    try_to([&] { lines_.emplace(path, options); });
  }
  void write(int64_t step, const Values& values) override {
    if (lines_) try_to([&] { lines_->write(step, values); });
  }

 private:
  template <class Act>
  void try_to(const Act& act) try {
    act();
  } catch (const IoError& error) {
    lines_.reset();
    log(LogLevel::Warning, "the record of the run gets no more metrics: {}", error.what());
  }

  std::optional<JsonlReporter> lines_;
};

}  // namespace

ReportFormat report_format(const std::string& name) {
  const std::filesystem::path place = name;
  const auto ending = place.extension().string();
  if (ending == ".jsonl") return ReportFormat::Jsonl;
  if (name == "mlflow" || (name.starts_with(kMlFlow) && name.size() > kMlFlow.size())) return ReportFormat::MlFlow;
  if (name.starts_with(kPrometheus) && port_in(name)) return ReportFormat::Prometheus;
  if (ending == ".csv") {
    auto lines = place;
    lines.replace_extension(".jsonl");
    throw ConfigError("no table is written to '{}': write {} and convert it: "
                      "python3 -c \"import pandas; pandas.read_json('{}', lines=True).to_csv('{}', index=False)\"",
                      name, lines, lines, name);
  }
  if (name == "wandb") throw ConfigError("no run of Weights & Biases is written: write FILE.jsonl and pass it on, as docs/seeing.md shows");
  std::error_code unknown;
  const bool is_there = std::filesystem::exists(place, unknown);
  const bool is_tracker = name.starts_with(kMlFlow) || name.starts_with(kPrometheus);
  const bool may_be_folder = !name.empty() && !is_tracker && (ending.empty() || name.ends_with('/'));
  if (is_there ? std::filesystem::is_directory(place, unknown) : may_be_folder) return ReportFormat::TensorBoard;
  throw ConfigError(
      "'{}' does not say what metrics are written as: FILE.jsonl for lines of JSON, FOLDER/ for TensorBoard, mlflow:FOLDER, or "
      "prometheus:PORT with a port from 1 to 65535",
      name);
}

std::unique_ptr<Reporter> make_reporter(const std::string& name, const ReporterOptions& options) {
  switch (report_format(name)) {
    case ReportFormat::Jsonl:
      return std::make_unique<JsonlReporter>(name, options);
    case ReportFormat::MlFlow:
      return std::make_unique<MlFlowReporter>(name.starts_with(kMlFlow) ? name.substr(kMlFlow.size()) : "mlruns", options);
    case ReportFormat::Prometheus:
      return std::make_unique<PrometheusReporter>(*port_in(name), options);
    case ReportFormat::TensorBoard:
      break;
  }
  return std::make_unique<TensorBoardReporter>(name, options);
}

Reporters::Reporters(const std::vector<std::string>& names, const ReporterOptions& options) {
  for (const auto& name : names) all_.push_back(make_reporter(name, options));
  const auto folder = run_folder();
  if (!folder) return;
  const auto file = *folder / "metrics.jsonl";
  const auto is_it = [&](const std::string& name) { return std::filesystem::absolute(name) == file; };
  if (std::ranges::none_of(names, is_it)) all_.push_back(std::make_unique<RecordReporter>(file, options));
}

void Reporters::write(int64_t step, const Values& values) {
  for (const auto& reporter : all_) reporter->write(step, values);
}

}  // namespace tessera::train
