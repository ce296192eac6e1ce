#include "tessera/cli/speed.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>

#include "tessera/comm/threads/run_ranks.h"

namespace tessera::cli::speed_test {
namespace {

using ::testing::AllOf, ::testing::HasSubstr, ::testing::Not;

Topology hosts_of(const std::vector<int>& host_of) {
  return Topology(host_of);
}

std::set<std::pair<int, int>> all_pairs(const Topology& topology) {
  std::set<std::pair<int, int>> found;
  for (const auto& round : rounds_of_pairs(topology)) {
    for (const auto& pair : round)
      EXPECT_TRUE(found.emplace(std::minmax(pair.first, pair.second)).second) << pair.first << ' ' << pair.second;
  }
  return found;
}

TEST(Speed, PairsRanksByTheirPlacesOnTheHosts) {
  using Pairs = std::set<std::pair<int, int>>;
  EXPECT_EQ(all_pairs(hosts_of({0, 0, 1, 1})), (Pairs{{0, 1}, {2, 3}, {0, 2}, {1, 3}}));
  EXPECT_EQ(all_pairs(hosts_of({0, 0, 0, 1})), (Pairs{{0, 1}, {1, 2}, {0, 3}, {1, 3}, {2, 3}}));
  EXPECT_EQ(all_pairs(hosts_of({0, 1, 2})), (Pairs{{0, 1}, {0, 2}, {1, 2}}));
  EXPECT_EQ(all_pairs(Topology::one_host(1)), Pairs());
}

TEST(Speed, UsesAHostInOnePairOfARoundOnly) {
  std::vector<int> host_of;
  for (int rank = 0; rank < 2048; rank++) host_of.push_back(rank / 8);
  const auto topology = hosts_of(host_of);
  const auto rounds = rounds_of_pairs(topology);
  EXPECT_LT(rounds.size(), 300U);  // minutes
  for (const auto& round : rounds) {
    std::set<int> busy;
    for (const auto& [first, second, latency, bandwidth] : round) {
      const int one = topology.host_of(first), other = topology.host_of(second);
      EXPECT_TRUE(busy.insert(one).second);
      if (one != other) {
        EXPECT_TRUE(busy.insert(other).second);
      }
    }
  }
}

Speeds three_hosts() {
  Speeds speeds{.topology = hosts_of({0, 0, 1, 1, 2, 2}),
                .hosts = {"a", "a", "b", "b", "c", "c"},
                .computing = std::vector<double>(6, 50e9),
                .pairs = {}};
  for (const auto& round : rounds_of_pairs(speeds.topology)) {
    for (auto pair : round) {
      const bool near = speeds.topology.host_of(pair.first) == speeds.topology.host_of(pair.second);
      pair.latency = near ? 10e-6 : 100e-6;
      pair.bandwidth = near ? 5e9 : 1e9;
      speeds.pairs.push_back(pair);
    }
  }
  return speeds;
}

TEST(Speed, ReportsBestMedianAndWorst) {
  EXPECT_THAT(speed_report(three_hosts()),
              AllOf(HasSubstr("50 GFLOP/s"), HasSubstr("5 GB/s"), HasSubstr("100 us"), HasSubstr("slow: none")));
}

TEST(Speed, NamesTheRankThatComputesSlowly) {
  auto speeds = three_hosts();
  speeds.computing[3] = 20e9;
  EXPECT_THAT(speed_report(speeds), AllOf(HasSubstr("slow: rank 3 (b) computes at 0.40 of the median"), Not(HasSubstr("sends"))));
}

TEST(Speed, NamesTheRankWithTheSlowLinkAndNotItsPeers) {
  auto speeds = three_hosts();
  for (auto& pair : speeds.pairs) {
    if (pair.first == 5 || pair.second == 5) {
      pair.bandwidth /= 10;
      pair.latency *= 4;
    }
  }
  EXPECT_THAT(speed_report(speeds),
              AllOf(HasSubstr("rank 5 (c) sends between hosts at 0.10"), HasSubstr("rank 5 (c) answers between hosts at 0.25"),
                    HasSubstr("ranks 3 (b) and 5 (c)"), Not(HasSubstr("rank 3 (b) sends"))));
}

TEST(Speed, MeasuresEveryPairOfThreads) {
  ::testing::internal::CaptureStdout();
  run_ranks(3, [](const Communicator& world) { measure_speed(world); }, {.host_of = {0, 0, 1}});
  EXPECT_THAT(::testing::internal::GetCapturedStdout(),
              AllOf(HasSubstr("computing"), HasSubstr("within a host, latency"), HasSubstr("between hosts, bandwidth"),
                    Not(HasSubstr("inf")), Not(HasSubstr("nan"))));
}

}  // namespace
}  // namespace tessera::cli::speed_test
