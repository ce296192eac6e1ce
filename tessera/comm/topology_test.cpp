// Which ranks share a host, and the order of sums over several hosts.
#include "tessera/comm/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/comm/communicator.h"
#include "tessera/comm/threads/run_ranks.h"

namespace tessera::topology_test {
namespace {

using ::testing::ElementsAre;

TEST(Topology, NumbersHostsInTheOrderOfTheirRanks) {
  const Topology topology(std::vector<int>{7, 3, 7, 3, 5});
  EXPECT_EQ(topology.hosts(), 3);
  EXPECT_EQ(topology.host_of(3), 1);
  EXPECT_THAT(topology.ranks_on(0), ElementsAre(0, 2));
  EXPECT_THAT(topology.ranks_on(2), ElementsAre(4));
  const auto part = topology.part(std::vector<int>{1, 2, 3});
  EXPECT_THAT(part.ranks_on(0), ElementsAre(0, 2));
  EXPECT_THAT(part.ranks_on(1), ElementsAre(1));
}

/// Numbers whose sum depends on the order in which they are added.
at::Tensor contribution(int rank, int64_t numel) {
  return (at::arange(numel).to(at::kFloat) * 1.7f + 0.1f).sin() * std::pow(10.0, rank % 3);
}

/// Ranks 0, 2 and 3 on one host, 1 and 4 on another.
const std::vector<int> kHosts = {0, 1, 0, 0, 1};

class Sums : public ::testing::TestWithParam<int64_t> {};

TEST_P(Sums, RunWithinHostsFirst) {
  const auto numel = GetParam();
  const auto at_rank = [&](int rank) { return contribution(rank, numel); };
  const auto by_hosts = (at_rank(0) + at_rank(2) + at_rank(3)) + (at_rank(1) + at_rank(4));
  const auto in_rank_order = at_rank(0) + at_rank(1) + at_rank(2) + at_rank(3) + at_rank(4);
  ASSERT_FALSE(at::equal(by_hosts, in_rank_order)) << "this test needs numbers that tell the orders apart";
  run_ranks(5,
            [&](const Communicator& world) {
              EXPECT_EQ(world.topology().hosts(), 2);
              const auto sum = at_rank(world.rank());
              world.all_reduce(sum).wait();
              EXPECT_TRUE(at::equal(sum, by_hosts));
              const auto mean = at_rank(world.rank());
              world.all_reduce(mean, {.op = Reduce::Mean}).wait();
              EXPECT_TRUE(at::equal(mean, by_hosts / 5));
            },
            {.host_of = kHosts});
}

TEST_P(Sums, AreTheSameOnTwoLevels) {
  const auto numel = GetParam();
  run_ranks(5,
            [&](const Communicator& world) {
              const auto flat = contribution(world.rank(), numel);
              world.all_reduce(flat).wait();
              // Adds as an engine would that sums on each host first, and then sends one sum for each host.
              const auto host = world.split(kHosts);
              EXPECT_EQ(host.topology().hosts(), 1);
              const bool leads = host.rank() == 0;
              std::vector<int> leaders;
              for (int rank = 0; rank < world.size(); rank++) {
                leaders.push_back(world.topology().ranks_on(world.topology().host_of(rank)).front() == rank ? 0 : 1 + rank);
              }
              const auto across = world.split(leaders);
              const auto nested = contribution(world.rank(), numel);
              host.all_reduce(nested).wait();
              if (leads) {
                EXPECT_EQ(across.topology().hosts(), 2);
                across.all_reduce(nested).wait();
              }
              host.broadcast(nested, 0).wait();
              EXPECT_TRUE(at::equal(flat, nested));
            },
            {.host_of = kHosts});
}

TEST(Topology, SaysWhoSharesMemory) {
  run_ranks(5,
            [](const Communicator& world) {
              const auto attempt = world.share({.bytes_per_rank = 64});
              EXPECT_EQ(attempt.area, nullptr);
              EXPECT_EQ(attempt.why_not, "transport threads: the ranks are on 2 hosts");
              EXPECT_NE(world.split(kHosts).share({.bytes_per_rank = 64}).area, nullptr);
            },
            {.host_of = kHosts});
}

INSTANTIATE_TEST_SUITE_P(OfNumbers, Sums, ::testing::Values(1000, 100'000));

}  // namespace
}  // namespace tessera::topology_test
