// The folder of TESSERA_RECORD, in which the ranks of a run leave their records, and its file run.json.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>

namespace tessera {

/// The environment variable that names the folder.
inline constexpr const char* kRunVariable = "TESSERA_RECORD";

/// Returns the folder, or nothing if the variable is unset. Throws ConfigError for a path in an object store, to which no lines can be
/// appended.
std::optional<std::filesystem::path> run_folder();

/// Returns run.json of the folder, or null if there is none. Throws ConfigError if it is damaged.
nlohmann::json read_run(const std::filesystem::path& folder);

/// Returns run.json of a run that was interrupted or has failed, which this job continues, or null if there is none. Throws ConfigError if
/// the folder has a finished run, unless `restarts` says that this job has begun it.
nlohmann::json run_to_continue(const std::filesystem::path& folder, int restarts);

void write_run(const std::filesystem::path& folder, const nlohmann::json& run);

/// Notes in run.json that the job has ended with this exit status, if its ranks could not.
void end_run(const std::filesystem::path& folder, int status);

}  // namespace tessera
