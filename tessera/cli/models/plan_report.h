// What `tessera plan` prints: a table of plans, a chart of their memory, and which one to take.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/train/display.h"

namespace tessera::cli {

/// A way to train, and the outcome of its dry run.
struct Plan {
  std::string name;                             // "FULL_SHARD+ac"
  int world = 1, ranks_per_host = 1;            // ranks
  std::map<std::string, std::string> settings;  // keys of a configuration that differ from the defaults
  int64_t tokens = 0;                           // of a rank and step; 0 if unknown
  double memory = 0;                            // that a rank may use; 0 if unknown
  nlohmann::ordered_json outcome = {};

  double peak() const { return outcome.at("memory").at("peak"); }
  double seconds() const { return outcome.at("time").at("step"); }
  bool fits() const { return memory == 0 || peak() <= memory; }
  double tokens_per_second() const { return static_cast<double>(tokens) * world / seconds(); }
};

/// Sorts plans: those that fit first; then those with the most tokens per second, which for one number of ranks are those with the shortest
/// step.
void sort_plans(std::vector<Plan>& plans);

/// Two tables: what a step takes, and the memory of a rank by kind where it takes the most.
std::string plan_tables(const std::vector<Plan>& plans);

struct ChartStyle {
  int columns = 80;
  train::Glyphs glyphs = train::Glyphs::Ascii;
  enum class Colours { No, Yes } colours = Colours::No;
};
/// Bars of the memory of the first plans, by kind. Empty if there are too few columns.
std::string plan_chart(const std::vector<Plan>& plans, const ChartStyle& style);

/// The command line that starts `program` with a plan.
std::string launch_line(const Plan& plan, const std::string& program);
/// Which plan to take, and why.
std::string plan_advice(const Plan& best, const std::string& program);

nlohmann::ordered_json json_of(const Plan& plan);

}  // namespace tessera::cli
