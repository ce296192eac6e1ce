// Computes what training steps take on a cluster, by tessera/simulate/network.h. Standard input is a JSON list of steps; bench/scaling has their
// members. Prints the list of their seconds.
#include <tessera/simulate/machine.h>
#include <tessera/simulate/network.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

namespace {

using namespace tessera;
using Json = nlohmann::json;

Topology topology_of(int hosts, int ranks) {
  std::vector<int> host_of(static_cast<size_t>(hosts) * ranks);
  for (size_t rank = 0; rank < host_of.size(); rank++) host_of[rank] = static_cast<int>(rank) / ranks;
  return Topology(host_of);
}

struct Cluster {
  simulate::Machine machine;
  int hosts;
  Topology world;
};

/// Seconds of a collective that moves this many bytes in a group of ranks.
using Collective = std::function<double(double bytes)>;

/// How units are gathered and reduced; no gather where ranks share the parameters anyway.
struct Strategy {
  Collective gather, reduce;
  bool again = true;  // whether backward gathers, too
};

/// Groups of `hosts` hosts shard the model, and replicas of a part add up their gradients, over one level.
Strategy hybrid(const Cluster& cluster, int hosts) {
  const int ranks = cluster.machine.ranks_per_host, own = std::min(hosts, cluster.hosts), groups = cluster.hosts / own;
  const auto group = topology_of(own, ranks), replicas = topology_of(groups, 1);
  const auto in_group = [=](Operation operation) {
    return [=](double bytes) { return simulate::collective_seconds(cluster.machine, operation, bytes, group, 1); };
  };
  const auto reduce = [=](double bytes) {
    return in_group(Operation::ReduceScatter)(bytes) +
           simulate::collective_seconds(cluster.machine, Operation::AllReduce, bytes / (own * ranks), replicas, 1);
  };
  const bool shares = cluster.machine.kind == "cpu";  // the parameters, within the host that is the group
  return {.gather = shares ? Collective() : in_group(Operation::AllGather), .reduce = reduce};
}

/// For values of `width` bytes; between hosts, the sums of two levels travel in float32.
Strategy strategy_named(const std::string& name, const Cluster& cluster, double width) {
  const auto collective = [=](Operation operation, int levels, double wider = 1, Among whole_of = Among::Group) {
    return [=](double bytes) {
      return simulate::collective_seconds(cluster.machine, operation, bytes * wider, cluster.world, levels, whole_of);
    };
  };
  const bool on_cpus = cluster.machine.kind == "cpu";
  const auto gather = collective(Operation::AllGather, 2);
  const auto reduce = collective(Operation::ReduceScatter, 2, on_cpus && cluster.hosts > 1 ? 4 / width : 1);
  const std::map<std::string, std::function<Strategy()>> strategies = {
      {"one level",
       [&] { return Strategy{collective(Operation::AllGather, 1), collective(Operation::ReduceScatter, 1)}; }},
      {"two levels", [&] { return Strategy{gather, reduce}; }},
      {"node-shared", [&] { return Strategy{collective(Operation::AllGather, 2, 1, Among::Host), reduce, false}; }},
      {"full shard", [&] { return Strategy{gather, reduce}; }},
      {"ZeRO-2", [&] { return Strategy{gather, reduce, false}; }},
      {"hybrid", [&] { return hybrid(cluster, 1); }},
      {"hybrid of 8 hosts", [&] { return hybrid(cluster, 8); }},
  };
  return strategies.at(name)();
}

/// The time of a rank that computes, and of its queue, which runs one operation after the other.
class Clock {
 public:
  explicit Clock(const Strategy& strategy) : strategy_(strategy) {}

  enum class Pass { Forward, Backward };
  /// The next unit is gathered while one computes, and a unit is reduced while the next computes.
  void run(const std::vector<double>& units, double seconds, Pass pass) {
    const auto all = std::accumulate(units.begin(), units.end(), 0.0);
    std::vector<double> ready(units.size(), -1);
    double reduced = 0;
    for (size_t at = 0; at < units.size(); at++) {
      for (size_t ahead = at; ahead <= at + 1 && ahead < units.size(); ahead++) {
        if (ready[ahead] >= 0) continue;
        // The unit that forward has used last is still there.
        const bool gathers = strategy_.gather && (pass == Pass::Forward || (strategy_.again && ahead > 0));
        ready[ahead] = gathers ? start(strategy_.gather, units[ahead]) : now_;
      }
      now_ = std::max(now_, ready[at]) + seconds * units[at] / all;
      if (pass == Pass::Forward) continue;
      now_ = std::max(now_, reduced);
      reduced = start(strategy_.reduce, units[at]);
    }
    now_ = std::max(now_, reduced);
  }
  double now() const { return now_; }

 private:
  double start(const Collective& operation, double bytes) {
    queue_ = std::max(queue_, now_) + operation(bytes);
    return queue_;
  }

  const Strategy& strategy_;
  double now_ = 0, queue_ = 0;
};

double step_seconds(const Json& step) {
  const int hosts = step.at("hosts"), ranks = step.at("ranks");
  Cluster cluster{.machine = simulate::Machine::named(step.at("kind")), .hosts = hosts, .world = topology_of(hosts, ranks)};
  cluster.machine.ranks_per_host = ranks;
  cluster.machine.inner = {.latency = step.at("inner").at(0), .bandwidth = step.at("inner").at(1)};
  cluster.machine.outer = {.latency = step.at("outer").at(0), .bandwidth = step.at("outer").at(1)};
  cluster.machine.message = step.at("message");
  const auto strategy = strategy_named(step.at("strategy"), cluster, step.at("width"));
  auto units = step.at("units").get<std::vector<double>>();
  const double compute = step.at("compute");
  Clock clock(strategy);
  clock.run(units, compute / 3, Clock::Pass::Forward);
  std::ranges::reverse(units);
  clock.run(units, compute * 2 / 3, Clock::Pass::Backward);
  return clock.now() + step.at("update").get<double>();
}

}  // namespace

int main() {
  Json seconds = Json::array();
  for (const auto& step : Json::parse(std::cin)) seconds.push_back(step_seconds(step));
  std::cout << seconds << '\n';
}
