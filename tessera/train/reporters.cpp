#include "tessera/train/reporters.h"

#include <fmt/format.h>

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

/// Renames the lines of an earlier attempt to metrics-1.jsonl, or the next number that is free. Returns whether there were any.
bool keep_earlier_lines(const std::filesystem::path& path) {
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown) || std::filesystem::file_size(path, unknown) == 0) return false;
  for (int number = 1;; number++) {
    const auto kept = path.parent_path() / fmt::format("metrics-{}.jsonl", number);
    if (std::filesystem::exists(kept, unknown)) continue;
    std::filesystem::rename(path, kept, unknown);
    if (unknown) throw IoError("can't rename {} to {}: {}", path, kept, unknown.message());
    return true;
  }
}

/// The file of the record. A program trains on if it can't be written.
class RecordReporter : public Reporter {
 public:
  RecordReporter(const std::filesystem::path& path, const ReporterOptions& options) {
    try_to([&] {
      if (options.rank == 0 && options.first_step <= 1) keep_earlier_lines(path);
      try {
        lines_.emplace(path, options);
      } catch (const IoError& error) {  // it is damaged, or can't be written
        if (options.rank != 0 || !keep_earlier_lines(path)) throw;
        log(LogLevel::Warning, "the metrics of an earlier attempt are set aside: {}", error.what());
        lines_.emplace(path, options);
      }
    });
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
  if (name.find(',') != std::string::npos) throw ConfigError("'{}' has a comma: give each place for metrics by itself", name);
  const bool is_tracker = name.starts_with(kMlFlow) || name.starts_with(kPrometheus) || name == "prometheus";
  if (ending == ".jsonl" && !is_tracker) return ReportFormat::Jsonl;
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
  const bool is_plain = !name.empty() && ending.empty() && name.find(':') == std::string::npos;
  const bool may_be_folder = !is_tracker && (is_plain || name.ends_with('/'));
  if (is_there && !is_tracker ? std::filesystem::is_directory(place, unknown) : may_be_folder) return ReportFormat::TensorBoard;
  throw ConfigError(
      "'{}' does not say what metrics are written as: FILE.jsonl for lines of JSON, FOLDER/ for TensorBoard, mlflow:FOLDER, or "
      "prometheus:PORT with a port from 1 to 65535",
      name);
}

void expect_free_ports(const std::vector<std::string>& names) {
  for (const auto& name : names) {
    if (report_format(name) == ReportFormat::Prometheus) PrometheusReporter::expect_free(*port_in(name));
  }
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
