#include "tessera/train/mlflow_reporter.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <exception>

#include "tessera/base/atomic_write.h"
#include "tessera/base/clock.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/base/secret.h"
#include "tessera/train/report.h"

namespace tessera::train {
namespace {

int64_t milliseconds_now() {
  return static_cast<int64_t>(unix_now() * 1e3);
}

std::string yaml_text(std::string_view text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? "''" : std::string(1, c);
  return result + "'";
}

/// The path of a metric's file. MLflow takes relative paths of letters, digits and _ - . / : and blanks.
std::string path_of_metric(std::string name) {
  for (char& c : name) {
    const auto letter = static_cast<unsigned char>(c);
    if (letter < 0x80 && std::isalnum(letter) == 0 && std::string_view("_-. /:").find(c) == std::string_view::npos) c = '_';
  }
  if (name.front() == '.') name.front() = '_';
  const std::filesystem::path path = name;
  if (path.is_absolute() || path.lexically_normal() != path || !path.has_filename()) std::ranges::replace(name, '/', '_');
  return name;
}

}  // namespace

MlFlowReporter::MlFlowReporter(const std::filesystem::path& store, const ReporterOptions& options)
    : started_(milliseconds_now()), exceptions_(std::uncaught_exceptions()) {
  if (options.rank != 0) return;
  const auto experiment = std::filesystem::absolute(store).lexically_normal() / "0";
  run_ = experiment / random_secret();
  for (const auto* folder : {"metrics", "params", "tags", "artifacts"}) make_folder(run_ / folder);
  if (!is_there(experiment / "meta.yaml")) {
    write_text(experiment / "meta.yaml",
               fmt::format("artifact_location: {}\ncreation_time: {}\nexperiment_id: '0'\nlast_update_time: {}\nlifecycle_stage: active\n"
                           "name: Default\n",
                           yaml_text(experiment.string()), started_, started_));
  }
  write_meta(Status::Running);
  write_text(run_ / "tags/mlflow.runName", program_invocation_short_name);
}

MlFlowReporter::~MlFlowReporter() {
  if (run_.empty()) return;
  try {
    write_meta(std::uncaught_exceptions() > exceptions_ ? Status::Failed : Status::Finished);
  } catch (const std::exception& error) {
    log(LogLevel::Warning, error.what());
  }
}

void MlFlowReporter::write_meta(Status status) const {
  const auto end = status == Status::Running ? "null" : std::to_string(milliseconds_now());
  write_text(run_ / "meta.yaml",
             fmt::format("artifact_uri: {}\nend_time: {}\nentry_point_name: ''\nexperiment_id: '0'\nlifecycle_stage: active\nrun_id: {}\n"
                         "run_name: {}\nsource_name: ''\nsource_type: 4\nsource_version: ''\nstart_time: {}\nstatus: {}\ntags: []\n"
                         "user_id: ''\n",
                         yaml_text((run_ / "artifacts").string()), end, yaml_text(run_.filename().string()),
                         yaml_text(program_invocation_short_name), started_, static_cast<int>(status)));
}

void MlFlowReporter::write(int64_t step, const Values& values) {
  if (run_.empty()) return;
  expect_names(run_, step, values);
  for (const auto& [name, value, unit] : values) {
    const auto path = run_ / "metrics" / path_of_metric(name);
    make_folders_for(path);
    write_report(open_report(path, O_APPEND), path, step, fmt::format("{} {} {}\n", milliseconds_now(), shortest_text(value), step));
  }
}

}  // namespace tessera::train
