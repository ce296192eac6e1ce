#include "tessera/cli/speed.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <numeric>
#include <set>

#include "tessera/base/format.h"
#include "tessera/base/middle.h"
#include "tessera/base/process.h"
#include "tessera/base/product_speed.h"
#include "tessera/base/table.h"
#include "tessera/base/words.h"
#include "tessera/comm/communicator.h"

namespace tessera::cli {
namespace {

// A rank is slow if it reaches less than this part of the median, or if its latency is longer than the median divided by it.
constexpr double kSlowPart = 0.6;
constexpr int kLatencyTries = 10;
constexpr auto kShortestTransfer = std::chrono::milliseconds(250);
constexpr int64_t kSmallestTransfer = 1 << 20, kLargestTransfer = 64 << 20;

std::string name_of_rank(const Speeds& speeds, int rank) {
  return fmt::format("{} ({})", rank, speeds.hosts[rank]);
}

/// A sentence about the ranks that are much slower than the median of all; empty if none is. `values` may lack ranks.
std::string name_slow(const Speeds& speeds, const std::vector<std::pair<int, double>>& values, std::string_view does) {
  std::vector<double> all;
  for (const auto& [rank, value] : values) all.push_back(value);
  if (all.size() < 2) return {};
  const auto middle = middle_of(all).second;
  std::vector<std::string> names;
  for (const auto& [rank, value] : values) {
    if (value < kSlowPart * middle) names.push_back(fmt::format("rank {} {} {:.2f}", name_of_rank(speeds, rank), does, value / middle));
  }
  return joined(names, "; ");
}

/// For each rank that has such pairs, the median over them.
std::vector<std::pair<int, double>> by_rank(const Speeds& speeds, std::span<const RankPair> pairs, double (*value)(const RankPair&)) {
  std::vector<std::pair<int, double>> found;
  for (int rank = 0; rank < speeds.topology.ranks(); rank++) {
    std::vector<double> own;
    for (const auto& pair : pairs) {
      if (pair.first == rank || pair.second == rank) own.push_back(value(pair));
    }
    if (!own.empty()) found.emplace_back(rank, middle_of(std::move(own)).second);
  }
  return found;
}

void measure_pair(const Communicator& two, RankPair& pair, const at::TensorOptions& options) {
  two.barrier();
  pair.latency = seconds_that_takes([&] { two.barrier(); });
  for (int i = 1; i < kLatencyTries; i++) pair.latency = std::min(pair.latency, seconds_that_takes([&] { two.barrier(); }));
  const auto took = at::empty({1}, options.dtype(at::kDouble));
  for (auto bytes = kSmallestTransfer; bytes <= kLargestTransfer; bytes *= 2) {
    const auto data = at::ones({bytes}, options.dtype(at::kByte));
    double slower = 0;
    for (const int root : {0, 1}) {
      two.barrier();
      took.fill_(seconds_that_takes([&] {
        two.broadcast(data, root).wait();
        data[0].item();  // waits for a device
      }));
      two.all_reduce(took, {.op = Reduce::Max}).wait();
      slower = std::max(slower, took.item<double>());
    }
    // A broadcast begins with an agreement, which takes as long as a barrier, and its bytes are under way for as long again.
    const auto moving = std::max(slower - 2 * pair.latency, slower / 100);
    pair.bandwidth = static_cast<double>(bytes) / moving;
    if (moving > std::chrono::duration<double>(kShortestTransfer).count()) break;
  }
}

}  // namespace

double seconds_that_takes(const std::function<void()>& act) {
  const auto begin = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::string bandwidth_text(double value) {
  return size_text(value) + "/s";
}

std::string computing_text(double value) {
  return in_unit(value, {"FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"});
}

SpeedRow speed_row(std::string name, std::span<const double> values, std::string (*text)(double),
                   const std::function<std::string(size_t)>& whose) {
  const auto is_better = [&](double a, double b) { return text == duration_text ? a < b : a > b; };
  std::vector<double> sorted(values.begin(), values.end());
  std::ranges::sort(sorted, is_better);
  const auto middle = sorted[(sorted.size() - 1) / 2];  // of two in the middle the better one, as name_slow takes it
  const auto worst = std::ranges::max_element(values, is_better) - values.begin();
  return {std::move(name), std::to_string(values.size()), text(sorted.front()), text(middle), text(values[worst]),
          whose(static_cast<size_t>(worst))};
}

std::string speed_table(std::vector<SpeedRow> rows) {
  rows.insert(rows.begin(), {"", "number", "best", "median", "worst", ""});
  std::string text;
  const auto lines = table_of(rows, "<>>>><");
  for (size_t begin = 0; begin < lines.size(); begin = lines.find('\n', begin) + 1) {
    text += "  " + lines.substr(begin, lines.find('\n', begin) + 1 - begin);
  }
  return text;
}

std::vector<std::vector<RankPair>> rounds_of_pairs(const Topology& topology) {
  std::vector<RankPair> pairs;
  const int hosts = topology.hosts();
  std::set<std::pair<int, int>> met;
  for (int distance = 1; distance < hosts; distance *= 2) {
    for (int host = 0; host < hosts; host++) {
      const auto [one, other] = std::minmax({host, (host + distance) % hosts});
      if (!met.emplace(one, other).second) continue;
      const auto here = topology.ranks_on(one), there = topology.ranks_on(other);
      for (size_t i = 0; i < std::max(here.size(), there.size()); i++) {
        pairs.push_back({.first = here[i % here.size()], .second = there[i % there.size()]});
      }
    }
  }
  for (int host = 0; host < hosts; host++) {
    const auto here = topology.ranks_on(host);
    for (size_t i = 1; i < here.size(); i++) pairs.push_back({.first = here[i - 1], .second = here[i]});
  }
  std::vector<std::vector<RankPair>> rounds;
  std::vector<std::set<int>> busy;  // the hosts of each round
  for (const auto& pair : pairs) {
    const int one = topology.host_of(pair.first), other = topology.host_of(pair.second);
    const auto free = std::ranges::find_if(busy, [&](const auto& used) { return !used.contains(one) && !used.contains(other); });
    const auto at = static_cast<size_t>(free - busy.begin());
    if (free == busy.end()) {
      busy.emplace_back();
      rounds.emplace_back();
    }
    busy[at].insert({one, other});
    rounds[at].push_back(pair);
  }
  return rounds;
}

std::string speed_report(const Speeds& speeds) {
  std::vector<SpeedRow> rows;
  std::vector<std::pair<int, double>> computing;
  for (int rank = 0; rank < std::ssize(speeds.computing); rank++) computing.emplace_back(rank, speeds.computing[rank]);
  rows.push_back(speed_row("computing", speeds.computing, computing_text,
                           [&](size_t i) { return "rank " + name_of_rank(speeds, static_cast<int>(i)); }));
  std::vector<std::string> slow = {name_slow(speeds, computing, "computes at")};
  for (const bool across : {false, true}) {
    std::vector<RankPair> pairs;
    std::ranges::copy_if(speeds.pairs, std::back_inserter(pairs), [&](const RankPair& pair) {
      return (speeds.topology.host_of(pair.first) != speeds.topology.host_of(pair.second)) == across;
    });
    if (pairs.empty()) continue;
    const std::string where = across ? "between hosts" : "within a host";
    const auto whose = [&](size_t i) {
      return fmt::format("ranks {} and {}", name_of_rank(speeds, pairs[i].first), name_of_rank(speeds, pairs[i].second));
    };
    std::vector<double> bandwidths, latencies;
    for (const auto& pair : pairs) {
      bandwidths.push_back(pair.bandwidth);
      latencies.push_back(pair.latency);
    }
    rows.push_back(speed_row(where + ", bandwidth", bandwidths, bandwidth_text, whose));
    rows.push_back(speed_row(where + ", latency", latencies, duration_text, whose));
    slow.push_back(
        name_slow(speeds, by_rank(speeds, pairs, [](const RankPair& pair) { return pair.bandwidth; }), "sends " + where + " at"));
    slow.push_back(
        name_slow(speeds, by_rank(speeds, pairs, [](const RankPair& pair) { return 1 / pair.latency; }), "answers " + where + " at"));
  }
  std::erase(slow, "");
  auto text = speed_table(std::move(rows));
  text += slow.empty() ? fmt::format("  slow: none; all ranks reach {} of the median\n", kSlowPart)
                       : "  slow: " + joined(slow, "; ") + " of the median\n";
  return text;
}

Speeds measured_speeds(const Communicator& world) {
  const at::TensorOptions options(world.traits().device);
  const auto ranks = world.size(), own = world.rank();
  auto rounds = rounds_of_pairs(world.topology());
  const auto number =
      std::accumulate(rounds.begin(), rounds.end(), size_t{0}, [](size_t sum, const auto& one) { return sum + one.size(); });
  // Each value is measured by one rank, and zero on the others.
  const auto values = at::zeros({ranks + 2 * static_cast<int64_t>(number)}, at::kDouble);
  auto* value = values.data_ptr<double>();
  world.barrier();
  value[own] = product_speed(options.dtype(at::kFloat), 384);
  auto* of_pair = value + ranks;
  for (auto& round : rounds) {
    auto colors = all_ranks(ranks);
    for (const auto& pair : round) colors[pair.second] = pair.first;
    const auto group = world.split(colors);
    for (auto& pair : round) {
      if (pair.first == own || pair.second == own) measure_pair(group, pair, options);
      if (pair.first == own) std::ranges::copy(std::array{pair.latency, pair.bandwidth}, of_pair);
      of_pair += 2;
    }
    world.barrier();
  }
  const auto all = values.to(world.traits().device);
  world.all_reduce(all).wait();
  values.copy_(all);
  Speeds speeds{.topology = world.topology(), .hosts = world.texts(host_name(), {}), .computing = {value, value + ranks}, .pairs = {}};
  of_pair = value + ranks;
  for (const auto& round : rounds) {
    for (const auto& pair : round) {
      speeds.pairs.push_back({.first = pair.first, .second = pair.second, .latency = of_pair[0], .bandwidth = of_pair[1]});
      of_pair += 2;
    }
  }
  return speeds;
}

void measure_speed(const Communicator& world) {
  if (!world.traits().can_differ()) {
    fmt::print("  nothing to measure: there are no other ranks in other threads or processes\n");
    return;
  }
  const auto speeds = measured_speeds(world);
  if (world.is_first()) fmt::print("{}", speed_report(speeds));
}

}  // namespace tessera::cli
