#include "tessera/train/mlflow_reporter.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <exception>
#include <fstream>
#include <functional>
#include <sstream>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/base/secret.h"
#include "tessera/train/report.h"

namespace tessera::train {
namespace {

int64_t milliseconds_now() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string whole_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A file of the store that has the newest run of this command line, --resume apart, in this folder.
std::filesystem::path note_of_command(const std::filesystem::path& store) {
  std::string text = std::filesystem::current_path().string();
  std::istringstream words(whole_text("/proc/self/cmdline"));
  for (std::string word; std::getline(words, word, '\0');) {
    if (word != "--resume") text += '\0' + word;
  }
  return store / fmt::format(".tessera-{:x}", std::hash<std::string>()(text));
}

std::string yaml_text(std::string_view text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? "''" : std::string(1, c);
  return result + "'";
}

}  // namespace

MlFlowReporter::MlFlowReporter(const std::filesystem::path& store, const ReporterOptions& options)
    : started_(milliseconds_now()), exceptions_(std::uncaught_exceptions()) {
  if (options.rank != 0) return;
  const auto experiment = std::filesystem::absolute(store).lexically_normal() / "0";
  make_folder(experiment);
  if (!is_there(experiment / "meta.yaml")) {
    write_text(experiment / "meta.yaml",
               fmt::format("artifact_location: {}\ncreation_time: {}\nexperiment_id: '0'\nlast_update_time: {}\nlifecycle_stage: active\n"
                           "name: Default\n",
                           yaml_text(experiment.string()), started_, started_));
  }
  const auto note = note_of_command(experiment.parent_path());
  auto id = options.first_step > 1 ? whole_text(note) : "";
  if (id.empty()) id = random_secret();
  run_ = experiment / id;
  for (const auto* folder : {"metrics", "params", "tags", "artifacts"}) make_folder(run_ / folder);
  drop_what_is_made_again(options);
  write_meta(Status::Running);
  write_text(run_ / "tags/mlflow.runName", program_invocation_short_name);
  write_text(note, id);
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

/// The file of a metric. MLflow takes relative paths of letters, digits and _ - . / : and blanks.
std::filesystem::path MlFlowReporter::metric(std::string name) const {
  for (char& c : name) {
    const auto letter = static_cast<unsigned char>(c);
    if (letter < 0x80 && std::isalnum(letter) == 0 && std::string_view("_-. /:").find(c) == std::string_view::npos) c = '_';
  }
  if (name.front() == '.') name.front() = '_';
  const std::filesystem::path path = name;
  if (path.is_absolute() || path.lexically_normal() != path || !path.has_filename()) std::ranges::replace(name, '/', '_');
  return run_ / "metrics" / name;
}

/// Shortens the file of each metric before the first line that this run writes again, or that a crash has cut off.
void MlFlowReporter::drop_what_is_made_again(const ReporterOptions& options) const try {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(run_ / "metrics")) {
    if (!entry.is_regular_file()) continue;
    std::istringstream lines(whole_text(entry.path()));
    uintmax_t kept = 0;
    for (std::string line; std::getline(lines, line) && !lines.eof(); kept += line.size() + 1) {
      const auto step = leading_number(std::string_view(line).substr(line.rfind(' ') + 1));
      if (!step || is_made_again(*step, options, [&](const std::string& name) { return metric(name) == entry.path(); })) break;
    }
    std::filesystem::resize_file(entry.path(), kept);
    if (kept == 0) std::filesystem::remove(entry.path());  // MLflow refuses a metric without a line
  }
} catch (const std::filesystem::filesystem_error& error) {
  throw IoError("the MLflow run {} can't be continued: {}", run_, error.what());
}

void MlFlowReporter::write(int64_t step, const Values& values) {
  if (run_.empty()) return;
  expect_names(run_, step, values);
  for (const auto& [name, value, unit] : values) {
    const auto path = metric(name);
    make_folders_for(path);
    write_report(open_report(path, O_APPEND), path, step, fmt::format("{} {} {}\n", milliseconds_now(), shortest_text(value), step));
  }
}

}  // namespace tessera::train
