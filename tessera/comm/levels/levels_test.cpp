// Two levels give the bits of one level, and send over the network what each host needs once.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/host/shared_area.h"
#include "tessera/comm/shm/shared_memory_link.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tests/testing/transports.h"

namespace tessera::testing::levels_test {
namespace {

using ::testing::HasSubstr;
using Hosts = std::vector<int>;

/// Two hosts of two ranks, three and one, one and two and four, and two whose ranks alternate.
const Hosts kHosts[] = {{0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 1, 2, 2, 2, 2}, {0, 1, 0, 1, 1}};

void over_hosts(const Hosts& host_of, const std::function<void(const Communicator& world)>& program) {
  run_world({.transport = "threads", .ranks = static_cast<int>(host_of.size()), .host_of = host_of}, program);
}

SharedBlock block_for(size_t ranks) {
  return SharedBlock::make(SharedBlock::Source::Heap, SharedMemoryLink::block_size(static_cast<int>(ranks)));
}

/// Random numbers, whose sum depends on the order of adding.
at::Tensor drawn(int rank, int64_t numel, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank) + 1);
  const auto numbers = at::randn({numel}, generator).mul_(100);
  return numbers.to(dtype);
}

/// The results of all operations with values of a dtype, on one rank.
std::vector<at::Tensor> results(const Communicator& world, int64_t numel, at::ScalarType dtype) {
  std::vector<at::Tensor> found;
  const auto own = drawn(world.rank(), numel, dtype);
  const Piece gathered{.whole = at::zeros({numel * world.size()}, own.options()), .own = own};
  world.all_gather(std::array{gathered}).wait();
  found.push_back(gathered.whole);
  for (const int root : {0, world.size() - 1}) {
    found.push_back(own.clone());
    world.broadcast(found.back(), root).wait();
  }
  std::vector<Reduction> reductions = {{.op = Reduce::Sum}, {.op = Reduce::Min}, {.op = Reduce::Max}};
  if (at::isFloatingType(dtype)) {
    reductions.push_back({.op = Reduce::Mean});
    reductions.push_back({.op = Reduce::Mean, .wire_dtype = at::kBFloat16, .sum_dtype = at::kDouble});
  }
  for (const auto& reduction : reductions) {
    found.push_back(own.clone());
    world.all_reduce(found.back(), reduction).wait();
    const Piece piece{.whole = drawn(world.rank(), numel * world.size(), dtype),
                      .own = at::zeros({numel}, own.options()),
                      .squares = std::make_shared<double>(-1)};
    world.reduce_scatter(std::array{piece}, reduction).wait();
    found.push_back(piece.own);
    if (!std::isnan(*piece.squares)) {
      EXPECT_NEAR(*piece.squares, piece.own.to(at::kDouble).pow(2).sum().item<double>(), 1e-5 * std::abs(*piece.squares));
    }
  }
  return found;
}

class OverHosts : public ::testing::TestWithParam<Hosts> {};

TEST_P(OverHosts, GivesTheBitsOfOneLevel) {
  const auto block = block_for(GetParam().size());
  over_hosts(GetParam(), [&](const Communicator& world) {
    EXPECT_EQ(world.traits().levels, 2);
    const auto flat = world_over({.link = std::make_shared<SharedMemoryLink>(block, world.rank(), all_ranks(world.size()))},
                                 {.name = "flat", .topology = world.topology()})
                          .with_limit(kTestLimit);
    EXPECT_EQ(flat.traits().levels, 1);
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
      for (const int64_t numel : {0, 1, 13, 300'001}) {
        if (numel > 1000 && dtype != at::kFloat && dtype != at::kBFloat16) continue;
        const auto expected = results(flat, numel, dtype), actual = results(world, numel, dtype);
        for (size_t i = 0; i < expected.size(); i++) {
          EXPECT_TRUE(at::equal(actual[i], expected[i])) << "result " << i << " of " << numel << " x " << dtype;
        }
      }
    }
  });
}

TEST_P(OverHosts, SendsOnceAHost) {
  over_hosts(GetParam(), [](const Communicator& world) {
    constexpr uint64_t kPart = 4000;
    const auto& topology = world.topology();
    const Piece piece{.whole = at::zeros({1000 * world.size()}), .own = at::zeros({1000})};
    const int host = topology.host_of(world.rank());
    const auto here = topology.ranks_on(host);
    uint64_t cared = 1;  // the ranks whose data this one passes on within its host, and itself
    for (int rank = 0; rank < world.size(); rank++) cared += topology.host_of(rank) != host && topology.partner(rank, host) == world.rank();
    world.all_gather(std::array{piece}).wait();
    const auto gathered = world.traffic(Operation::AllGather);
    EXPECT_EQ(gathered.across, kPart * static_cast<uint64_t>(topology.hosts() - 1));
    EXPECT_EQ(gathered.bytes - gathered.across, kPart * cared * (here.size() - 1));
    for (const auto wire : {at::kFloat, at::kBFloat16}) {
      world.reset_traffic();
      world.reduce_scatter(std::array{piece}, {.wire_dtype = wire}).wait();
      const auto reduced = world.traffic(Operation::ReduceScatter);
      EXPECT_EQ(reduced.across, kPart * (cared - 1)) << "sums are float32 at least";
      EXPECT_EQ(reduced.bytes - reduced.across, kPart / 4 * c10::elementSize(wire) * (static_cast<uint64_t>(world.size()) - cared));
    }
    world.broadcast(piece.own, 1).wait();
    EXPECT_EQ(world.traffic(Operation::Broadcast).across, world.rank() == 1 ? kPart * static_cast<uint64_t>(topology.hosts() - 1) : 0);
  });
}

TEST_P(OverHosts, GathersToMemoryOfTheHost) {
  over_hosts(GetParam(), [](const Communicator& world) {
    const int64_t numel = 100'003;
    const auto bytes = static_cast<size_t>(numel) * sizeof(float);
    const auto attempt = world.share({.bytes_per_rank = bytes, .counters = 1, .among = Among::Host});
    ASSERT_NE(attempt.area, nullptr) << attempt.why_not;
    const auto& area = *attempt.area;
    const auto here = world.topology().ranks_on(world.topology().host_of(world.rank()));
    EXPECT_EQ(area.size(), std::ssize(here));
    const auto whole = at::from_blob(area.part(0), {numel * world.size()}, at::kFloat);
    const Piece piece{.whole = whole, .own = whole.narrow(0, numel * world.rank(), numel)};
    for (int round = 0; round < 3; round++) {
      piece.own.copy_(drawn(world.rank() + 10 * round, numel, at::kFloat));
      world.reset_traffic();
      world.all_gather_on_host(std::array{piece}, {.unit = "parameters"}).wait();
      for (int rank = 0; rank < world.size(); rank++) {
        EXPECT_TRUE(at::equal(whole.narrow(0, numel * rank, numel), drawn(rank + 10 * round, numel, at::kFloat))) << rank;
      }
      EXPECT_EQ(world.traffic(Operation::AllGather).bytes, world.traffic(Operation::AllGather).across);
      world.barrier();
    }
    // Ranks of one host wait for each other in the shared memory, whatever the other hosts do.
    area.reach(0, 1);
    area.wait(0, 1, kTestLimit, [] { return std::string("waiting for the host"); });
  });
}

TEST_P(OverHosts, SplitsIntoPartsWithAsManyLevelsAsTheyNeed) {
  over_hosts(GetParam(), [](const Communicator& world) {
    const auto& topology = world.topology();
    std::vector<int> by_host, by_place, two(static_cast<size_t>(world.size()), 0);
    for (int rank = 0; rank < world.size(); rank++) {
      by_host.push_back(topology.host_of(rank));
      by_place.push_back(topology.place_of(rank));
    }
    const auto host = world.split(by_host);
    EXPECT_EQ(host.traits().levels, 1);
    EXPECT_NE(host.share({.bytes_per_rank = 64}).area, nullptr);
    const auto across = world.split(by_place);
    EXPECT_EQ(across.traits().levels, 1);
    EXPECT_EQ(across.topology().hosts(), across.size());
    two.back() = 1;
    const auto most = world.split(two);
    EXPECT_EQ(most.traits().levels, most.topology().hosts() > 1 && most.topology().hosts() < most.size() ? 2 : 1);
    for (const auto& part : {host, across, most, world.duplicate()}) {
      const auto sum = at::full({5}, static_cast<float>(world.rank()));
      part.all_reduce(sum).wait();
      float expected = 0;
      for (int rank = 0; rank < part.size(); rank++) expected += static_cast<float>(part.world_rank(rank));
      EXPECT_EQ(sum[4].item<float>(), expected);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, OverHosts, ::testing::ValuesIn(kHosts));

TEST(Share, IsRefusedToAllRanksOfSeveralHosts) {
  over_hosts({0, 0, 1}, [](const Communicator& world) {
    EXPECT_EQ(world.share({.bytes_per_rank = 64}).why_not, "transport threads: the ranks are on 2 hosts");
  });
}

// Rank 2 knows nothing of the link in which rank 1 waits for rank 0, which hears of the abort between the hosts.
TEST(Abort, ReachesRanksThatWaitInAnotherLink) {
  std::barrier together(4);
  over_hosts({0, 0, 1, 1}, [&](const Communicator& world) {
    const auto host = world.split(std::vector{0, 0, 1, 1}), across = world.split(std::vector{0, 1, 0, 1});
    together.arrive_and_wait();
    if (world.rank() == 2) across.abort("enough of this");
    const auto said = message_of<CommError>([&] { (world.rank() % 2 == 0 ? across : host).barrier(); });
    EXPECT_THAT(said, HasSubstr("rank 2: enough of this")) << world.rank();
    together.arrive_and_wait();  // the end of a rank would tell the others, too
  });
}

TEST(Exchange, MovesAnySizesBetweenRanks) {
  constexpr int kRanks = 4;
  const auto block = block_for(kRanks);
  run_ranks(kRanks, [&](const Communicator& world) {
    SharedMemoryLink link(block, world.rank(), all_ranks(kRanks));
    // Nothing, a few bytes, more than a slot has room for; of each rank another number.
    const auto size_of = [](int round, int from, int to) {
      return round == 0 || (from + to) % 3 == 0 ? size_t{0} : static_cast<size_t>((from * 10 + to + 1) * (round == 1 ? 3 : 70'001));
    };
    for (int round = 0; round < 3; round++) {
      std::vector<std::vector<std::byte>> sent(kRanks), received(kRanks);
      std::vector<ConstBytes> to(kRanks);
      std::vector<Bytes> from(kRanks);
      for (int r = 0; r < kRanks; r++) {
        sent[r].assign(size_of(round, world.rank(), r), static_cast<std::byte>(world.rank() * 10 + r));
        received[r].resize(size_of(round, r, world.rank()));
        to[r] = sent[r];
        from[r] = received[r];
      }
      link.exchange(to, from, Clock::now() + kTestLimit);
      for (int r = 0; r < kRanks; r++) {
        if (r == world.rank()) continue;
        EXPECT_EQ(received[r], std::vector<std::byte>(received[r].size(), static_cast<std::byte>(r * 10 + world.rank())));
      }
    }
    world.barrier();
  });
}

}  // namespace
}  // namespace tessera::testing::levels_test
