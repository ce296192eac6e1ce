// Measures how fast ranks compute and how fast they reach each other, and says which of them are slow, for `tessera test --speed`.
#pragma once

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

/// Measures the ranks of a world. Rank 0 prints the report. Collective.
void measure_speed(const Communicator& world);

}  // namespace tessera::cli
