// Measures how fast ranks compute and how fast they reach each other, and says which of them are slow, for `tessera test --speed`.
#pragma once

#include <array>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/topology.h"

namespace tessera {
class Communicator;
}

namespace tessera::cli {

/// Two ranks of a world, and what was measured between them.
struct RankPair {
  int first, second;
  double latency = 0;    // seconds until both know that the other has come
  double bandwidth = 0;  // bytes per second, in the slower direction
};

struct Speeds {
  Topology topology;
  std::vector<std::string> hosts;  // the name of each rank's host
  std::vector<double> computing;   // operations per second of each rank, while all ranks compute
  std::vector<RankPair> pairs;
};

/// The pairs to measure, in rounds: in each round a host is in one pair at most, so that pairs do not share its network. Within a host each
/// rank is paired with the next. Between hosts, only those are paired whose numbers differ by a power of two, so that a large cluster takes
/// minutes and not hours; their ranks are paired by their places on the hosts.
std::vector<std::vector<RankPair>> rounds_of_pairs(const Topology& topology);

/// A table of the best, the median and the worst of all ranks and pairs, and a line that names the ranks that are much slower than most.
std::string speed_report(const Speeds& speeds);

/// Measures the ranks of a world. Collective, as the two functions that follow.
Speeds measured_speeds(const Communicator& world);
/// Rank 0 prints a report of measured_speeds().
void measure_speed(const Communicator& world);
/// Measures all that a simulate::Machine has, while all ranks work. Rank 0 writes the medians over the ranks to the file, and prints them
/// beside the slowest ranks.
void calibrate(const Communicator& world, const std::string& file);

double seconds_that_takes(const std::function<void()>& act);

/// A row of a table: the best, the median and the worst of the values, and whose the worst is. Durations are better if they are shorter.
using SpeedRow = std::array<std::string, 6>;
SpeedRow speed_row(std::string name, std::span<const double> values, std::string (*text)(double),
                   const std::function<std::string(size_t)>& whose);
std::string bandwidth_text(double value);
std::string computing_text(double value);
/// A heading above the rows, all of them two columns to the right.
std::string speed_table(std::vector<SpeedRow> rows);

}  // namespace tessera::cli
