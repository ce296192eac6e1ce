// The folder of TESSERA_RECORD, in which the ranks of a run leave their records, and its file run.json.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "tessera/base/fd.h"

namespace tessera {

/// The environment variable that names the folder.
inline constexpr const char* kRunVariable = "TESSERA_RECORD";

/// Returns the folder, or nothing if the variable is unset. Throws ConfigError for a path in an object store, to which no lines can be
/// appended.
std::optional<std::filesystem::path> run_folder();

/// Returns run.json of the folder, or null if there is none. Throws ConfigError if it is damaged.
nlohmann::json read_run(const std::filesystem::path& folder);

/// Returns run.json of a run that was interrupted or has failed, which this job continues, or null if there is none. Throws ConfigError if
/// the folder has a finished run, or one on other than `world` ranks if that is known, unless `restarts` says that this job has begun it.
nlohmann::json run_to_continue(const std::filesystem::path& folder, std::optional<int> world, int restarts);

/// How often ranks have begun to record in the folder of this run.json; its member `earlier` has all of these but the last.
int attempts_in(const nlohmann::json& run);

/// Opens the file of lines of a rank, and locks it for as long as it is open. Throws IoError if it can't, and ConfigError if another job
/// records in the folder.
Fd open_lines(const std::filesystem::path& folder, int rank);

/// Whether a job that runs records in the folder.
bool is_recorded(const std::filesystem::path& folder);

void write_run(const std::filesystem::path& folder, const nlohmann::json& run);

/// Notes in run.json how the job has ended: "done", "failed" or "interrupted", and the cause of a failure.
void end_run(const std::filesystem::path& folder, const char* status, const std::string& cause);

}  // namespace tessera
