// The step of a program as XLA devices that are not here would run it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::cli {

struct TracedStep {
  std::string text;            // StableHLO: of a step that is cut, the largest part
  nlohmann::ordered_json cuts;  // {"fallbacks": {"aten::histc": 1}, "host_reads": {"item()": 3}}
};

/// Runs a program as so many replicas on no device, for that plugin, until it has traced the same step again, and ends it. Throws Error
/// with the program's output if it ends before that.
TracedStep traced_step(const std::vector<std::string>& command, int replicas, const std::string& plugin);

}  // namespace tessera::cli
