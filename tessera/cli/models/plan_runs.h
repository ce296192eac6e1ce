// Dry runs in processes of their own, for `tessera plan`.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::cli {

struct PlannedRun {
  int world = 1, ranks_per_host = 1;
  std::map<std::string, std::string> environment = {};
  std::function<void()> body = {};  // runs in the child: trains, or becomes another program
};

struct PlannedOutcome {
  nlohmann::ordered_json json = {};  // null if the run has taken no step
  std::string fault = {};            // why not, and what it printed
};

/// Runs all, `at_once` at a time, and calls `progress` with how many have ended. A run that takes ten minutes is ended. This process must not
/// have started threads.
std::vector<PlannedOutcome> planned_outcomes(const std::vector<PlannedRun>& runs, int at_once, const std::function<void(size_t)>& progress);

}  // namespace tessera::cli
