// All transports pass the conformance checks at every world size, and give the same bits.
#include "tessera/comm/conformance.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::testing::conformance_test {
namespace {

class EveryWorld : public ::testing::TestWithParam<World> {};

TEST_P(EveryWorld, KeepsItsPromises) {
  const auto program = [](const Communicator& world) {
    for (const auto& check : conformance_checks(world)) {
      try {
        check.run(world);
      } catch (...) {
        std::rethrow_exception(with_context(check.operation + " " + check.what + ": "));
      }
    }
  };
  run_world(GetParam(), program, std::chrono::minutes(1));  // seven ranks may share an emulated processor
}

TEST_P(EveryWorld, CountsWhatItSends) {
  if (!GetParam().host_of.empty()) return;  // levels_test counts for these
  run_world(GetParam(), [](const Communicator& world) {
    const auto others = static_cast<uint64_t>(world.size() - 1);
    const Piece piece{.whole = at::zeros({100 * world.size()}), .own = at::zeros({100})};
    for (int i = 0; i < 3; i++) world.all_gather(std::array{piece}).wait();
    EXPECT_EQ(world.traffic(Operation::AllGather).calls, 3);
    EXPECT_EQ(world.traffic(Operation::AllGather).bytes, 3 * others * 400);
    world.reduce_scatter(std::array{piece}).wait();
    EXPECT_EQ(world.traffic(Operation::ReduceScatter).bytes, others * 400);
    world.reduce_scatter(std::array{piece}, {.wire_dtype = at::kBFloat16}).wait();
    EXPECT_EQ(world.traffic(Operation::ReduceScatter).bytes, others * 600);
    world.barrier();
    EXPECT_EQ(world.traffic(Operation::Barrier).calls, 1);
    EXPECT_EQ(world.traffic(Operation::Barrier).bytes, 0);
    world.reset_traffic();
    EXPECT_EQ(world.traffic(Operation::AllGather).calls, 0);
  });
}

TEST_P(EveryWorld, CutsAFlatTensorIntoEqualChunks) {
  run_world(GetParam(), [](const Communicator& world) {
    const auto flat = at::arange(10, at::kFloat);
    const auto chunk = world.own_chunk(flat);
    const Piece piece{.whole = at::zeros({chunk.numel() * world.size()}), .own = chunk};
    ASSERT_EQ(chunk.numel(), (10 + world.size() - 1) / world.size());
    if (world.traits().simulated) return;
    world.all_gather(std::array{piece}).wait();
    EXPECT_TRUE(at::equal(piece.whole.narrow(0, 0, 10), flat));
    EXPECT_EQ(piece.whole.narrow(0, 10, piece.whole.numel() - 10).abs().sum().item<float>(), 0);
  });
}

/// Apart from EveryWorld, whose tests count sent bytes exactly.
TEST(CollectivesOfABackend, KeepTheirPromises) {
  for (const int ranks : {1, 2, 3}) {
    run_world({.transport = "gloo_collectives", .ranks = ranks}, [](const Communicator& world) {
      EXPECT_EQ(world.traits().sums, SumOrder::Any);
      for (const auto& check : conformance_checks(world)) EXPECT_NO_THROW(check.run(world)) << check.operation << " " << check.what;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, EveryWorld, ::testing::ValuesIn(all_worlds()), ::testing::PrintToStringParamName());

/// Random numbers, whose sum depends on the order of adding.
std::vector<at::Tensor> rounded_sums(const World& which) {
  std::vector<at::Tensor> results(static_cast<size_t>(which.ranks));
  run_world(which, [&](const Communicator& world) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(world.rank()));
    const auto big = at::randn({70'001}, generator);
    const auto small = at::randn({17}, generator);
    const Piece piece{.whole = at::randn({501 * world.size()}, generator), .own = at::zeros({501})};
    world.all_reduce(big).wait();
    world.all_reduce(small, {.op = Reduce::Mean}).wait();
    world.reduce_scatter(std::array{piece}, {.op = Reduce::Mean, .wire_dtype = at::kBFloat16}).wait();
    results[world.rank()] = at::cat({big, small, piece.own});
  });
  return results;
}

TEST(Determinism, GivesTheSameBitsOnEveryTransport) {
  for (const int ranks : {2, 3, 7}) {
    const auto expected = rounded_sums({.transport = "threads", .ranks = ranks});
    for (const auto* transport : {"threads", "shm", "gloo"}) {
      const auto actual = rounded_sums({.transport = transport, .ranks = ranks});
      for (int r = 0; r < ranks; r++) EXPECT_TRUE(at::equal(actual[r], expected[r])) << transport << " rank " << r << " of " << ranks;
    }
  }
}

}  // namespace
}  // namespace tessera::testing::conformance_test
