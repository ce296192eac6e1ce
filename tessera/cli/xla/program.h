// Adds `tessera xla program`, and prints figures of compiled programs.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

namespace CLI {
class App;
}

namespace tessera::cli {

/// Adds the command to `tessera xla`.
void add_xla_program_command(CLI::App& xla, std::function<int()>& chosen);

/// Reads the records that the processes of a run have left in a folder, ordered by process: {"process": 4711, ..., "programs": [{"file":
/// ..., "memory": {...}}]}.
nlohmann::ordered_json runs_in(const std::filesystem::path& folder);

/// Prints, for people, the operators that ran on the CPU, and the host's reads that split steps.
void print_cuts(const nlohmann::ordered_json& run);

/// Prints, for people, pjrt::figures_of(): memory, floating-point operations, and what makes devices wait for each other.
void print_figures(const nlohmann::ordered_json& figures);

}  // namespace tessera::cli
