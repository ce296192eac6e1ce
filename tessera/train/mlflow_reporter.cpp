#include "tessera/train/mlflow_reporter.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <exception>
#include <fstream>
#include <sstream>
#include <utility>

#include "tessera/base/atomic_write.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/base/secret.h"
#include "tessera/base/words.h"
#include "tessera/train/report.h"

namespace tessera::train {
namespace {

constexpr auto kMetaFile = "meta.yaml", kCommandTag = "tessera.command";

int64_t milliseconds_now() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string whole_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The command line of this process and its folder, without --resume.
std::string command_of_run() {
  std::error_code unknown;
  std::string text = std::filesystem::current_path(unknown).string() + ":";
  std::istringstream words(whole_text("/proc/self/cmdline"));
  for (std::string word; std::getline(words, word, '\0');) {
    if (word != "--resume") text += " " + word;
  }
  return printable(text);
}

std::string yaml_text(std::string_view text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? "''" : std::string(1, c);
  return result + "'";
}

/// The time at which a run began, by its meta.yaml; nothing if there is no such run.
std::optional<int64_t> start_of(const std::filesystem::path& run) {
  constexpr std::string_view kKey = "\nstart_time: ";
  const auto meta = whole_text(run / kMetaFile);
  const auto found = meta.find(kKey);
  return found == std::string::npos ? std::nullopt : leading_number(std::string_view(meta).substr(found + kKey.size()));
}

/// Returns the newest run of this command; an empty path if there is none.
std::filesystem::path newest_run(const std::filesystem::path& experiment, const std::string& command) {
  std::pair<int64_t, std::filesystem::path> newest;
  for (const auto& name : names_in(experiment).value_or(std::vector<std::string>())) {
    const auto run = experiment / name;
    const auto start = start_of(run);
    if (start && whole_text(run / "tags" / kCommandTag) == command) newest = std::max(newest, {*start, run});
  }
  return newest.second;
}

/// The name under which MLflow takes a metric: a relative path of letters, digits and _ - . / : and blanks.
std::string mlflow_name(std::string name) {
  for (char& c : name) {
    const auto letter = static_cast<unsigned char>(c);
    if (letter < 0x80 && std::isalnum(letter) == 0 && std::string_view("_-. /:").find(c) == std::string_view::npos) c = '_';
  }
  const std::filesystem::path path = name;
  const bool is_plain = path.is_relative() && path.lexically_normal() == path && path.has_filename() && *path.begin() != "..";
  if (!is_plain) std::ranges::replace(name, '/', '_');
  return name == "." || name == ".." ? "_" : name;
}

}  // namespace

MlFlowReporter::MlFlowReporter(const std::filesystem::path& store, const ReporterOptions& options)
    : started_(milliseconds_now()), exceptions_(std::uncaught_exceptions()) {
  if (options.rank != 0) return;
  const auto experiment = std::filesystem::absolute(store).lexically_normal() / "0";
  make_folder(experiment);
  if (!is_there(experiment / kMetaFile)) {
    write_text(experiment / kMetaFile,
               fmt::format("artifact_location: {}\ncreation_time: {}\nexperiment_id: '0'\nlast_update_time: {}\nlifecycle_stage: active\n"
                           "name: Default\n",
                           yaml_text(experiment.string()), started_, started_));
  }
  const auto command = command_of_run();
  if (const auto id = env("MLFLOW_RUN_ID")) {
    if (id->find('/') != std::string::npos || id->starts_with('.')) throw ConfigError("MLFLOW_RUN_ID '{}' is not the id of a run", *id);
    run_ = experiment / *id;
  } else if (options.first_step > 1) {
    run_ = newest_run(experiment, command);
  }
  if (run_.empty()) run_ = experiment / random_secret();
  if (const auto start = start_of(run_)) {
    started_ = *start;
    drop_what_is_made_again(options);
  }
  for (const auto* folder : {"metrics", "params", "tags", "artifacts"}) make_folder(run_ / folder);
  write_meta(Status::Running);
  write_text(run_ / "tags/mlflow.runName", program_invocation_short_name);
  write_text(run_ / "tags/mlflow.source.name", program_invocation_name);
  write_text(run_ / "tags" / kCommandTag, command);
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
  write_text(run_ / kMetaFile, fmt::format("artifact_uri: {}\nend_time: {}\nentry_point_name: ''\nexperiment_id: '0'\nlifecycle_stage: active\n"
                                       "run_id: {}\nrun_name: {}\nsource_name: {}\nsource_type: 4\nsource_version: ''\nstart_time: {}\n"
                                       "status: {}\ntags: []\nuser_id: {}\n",
                                       yaml_text((run_ / "artifacts").string()), end, yaml_text(run_.filename().string()),
                                       yaml_text(program_invocation_short_name), yaml_text(program_invocation_name), started_,
                                       static_cast<int>(status), yaml_text(env("USER").value_or(""))));
}

std::filesystem::path MlFlowReporter::metric(const std::string& name) const {
  return run_ / "metrics" / mlflow_name(name);
}

/// Shortens the file of each metric before the first line that this run writes again, or that a crash has cut off.
void MlFlowReporter::drop_what_is_made_again(const ReporterOptions& options) const try {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(run_ / "metrics")) {
    if (!entry.is_regular_file()) continue;
    std::ifstream lines(entry.path(), std::ios::binary);
    uintmax_t kept = 0;
    for (std::string line; std::getline(lines, line) && !lines.eof(); kept += line.size() + 1) {
      const auto step = leading_number(std::string_view(line).substr(line.rfind(' ') + 1));
      if (!step || is_made_again(*step, options, [&](const std::string& name) { return metric(name) == entry.path(); })) break;
    }
    lines.close();
    // A metric without a line is an error to MLflow.
    kept == 0 ? static_cast<void>(std::filesystem::remove(entry.path())) : std::filesystem::resize_file(entry.path(), kept);
  }
} catch (const std::filesystem::filesystem_error& error) {
  throw IoError("the MLflow run {} can't be continued: {}", run_, error.what());
}

void MlFlowReporter::write(int64_t step, const Values& values) {
  if (run_.empty()) return;
  expect_names(run_, step, values);
  const auto time = milliseconds_now();
  for (const auto& [name, value, unit] : values) {
    const auto path = metric(name);
    make_folders_for(path);
    const auto number = std::isfinite(value) ? shortest_text(value) : std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    write_report(open_report(path, O_APPEND), path, step, fmt::format("{} {} {}\n", time, number, step));
  }
}

}  // namespace tessera::train
