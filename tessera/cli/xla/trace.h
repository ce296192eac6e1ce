// Traces the training step of a program as XLA devices would run it, without having them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::cli {

struct TracedStep {
  std::string text;            // the step in StableHLO; its largest part if the step is cut
  nlohmann::ordered_json cuts;  // {"fallbacks": {"aten::histc": 1}, "host_reads": {"item()": 3}}
};

/// Runs a program without a device, as `replicas` replicas of the plugin, until the program has traced its step repeatedly, and then kills
/// it. Throws Error with the program's output if the program ends before that.
TracedStep traced_step(const std::vector<std::string>& command, int replicas, const std::string& plugin);

}  // namespace tessera::cli
