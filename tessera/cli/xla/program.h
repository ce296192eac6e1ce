// `tessera xla program`, and how figures of programs are shown.
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

/// The records that the processes of a run have left in a folder, in order: {"process": 4711, ..., "programs": [{"file": ..., "memory":
/// {...}}]}.
nlohmann::ordered_json runs_in(const std::filesystem::path& folder);

/// Prints, for people, what ran on the CPU or cut steps.
void print_cuts(const nlohmann::ordered_json& run);

/// Prints, for people, pjrt::figures_of(): memory, floating-point operations, and what makes devices wait for each other.
void print_figures(const nlohmann::ordered_json& figures);

}  // namespace tessera::cli
