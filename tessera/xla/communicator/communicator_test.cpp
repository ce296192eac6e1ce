// The engine whose ranks are replicas keeps the promises of all engines.
#include "tessera/base/error.h"
#include "tessera/comm/conformance.h"
#include "tessera/xla/device/program_runner.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/init.h"
#include "tests/testing/transports.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::xla {
namespace {

using tessera::testing::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kReplicas = 4;

const Communicator& four() {
  static const auto world = init({.devices = kReplicas});
  return world;
}

/// A tensor with each replica's own number.
at::Tensor numbers_of_replicas(at::ScalarType type = at::kFloat) {
  std::vector<at::Tensor> values;
  for (int replica = 0; replica < kReplicas; replica++) values.push_back(torch::full({2}, replica, type));
  return four().from_replicas(values);
}

std::vector<float> firsts(const std::vector<at::Tensor>& values) {
  std::vector<float> numbers;
  for (const auto& value : values) numbers.push_back(value[0].item<float>());
  return numbers;
}

TEST(Communicator, KeepsItsPromises) {
  for (const auto& check : conformance_checks(four())) EXPECT_NO_THROW(check.run(four())) << check.operation << " " << check.what;
}

TEST(Communicator, OfAPartHasItsReplicas) {
  const auto half = four().split(std::vector{0, 1, 0, 1});
  EXPECT_EQ(half.size(), 2);
  EXPECT_EQ(half.world_rank(1), 2);
  auto sum = numbers_of_replicas();
  half.all_reduce(sum).wait();
  EXPECT_EQ(firsts(four().replicas(sum)), (std::vector<float>{2, 4, 2, 4}));
  EXPECT_EQ(firsts(half.replicas(numbers_of_replicas())), (std::vector<float>{0, 2}));
  EXPECT_EQ(firsts(four().replicas(half.from_replicas(std::vector{torch::zeros(1), torch::ones(1)}))), (std::vector<float>{0, 0, 1, 1}));
  EXPECT_THAT(message_of<UsageError>([] { (void)four().split(std::vector{0, 0, 0, 1}); }), HasSubstr("groups of 3 and of 1"));
}

TEST(Communicator, GivesEachReplicaItsPartWithoutTheHost) {
  const auto before = metrics();
  const auto whole = torch::arange(10, torch::TensorOptions(four().traits().device).dtype(torch::kFloat)) * 2;
  const auto chunk = four().own_chunk(whole);
  EXPECT_EQ(metrics().executions, before.executions);
  EXPECT_EQ(firsts(four().replicas(chunk)), (std::vector<float>{0, 6, 12, 18}));
  EXPECT_EQ(firsts(four().replicas(four().own_chunk(torch::arange(8, torch::kFloat)))), (std::vector<float>{0, 2, 4, 6}));
}

TEST(Communicator, GivesEachReplicaItsPartByTextThatDoesNotGrow) {
  const auto where = torch::TensorOptions(four().traits().device).dtype(torch::kFloat);
  const auto whole = torch::arange(24, where).view({8, 3}) * 2;
  const auto rows = four().to_local_ranks(whole), padded = four().own_chunk(torch::arange(7, where) + 1);
  const auto half = four().split(std::vector{0, 0, 1, 1});
  const auto of_half = half.from_replicas(whole.chunk(2));
  auto from_first = four().from_replicas((whole.narrow(0, 0, 4) + 0).chunk(4));
  half.broadcast(from_first, 1).wait();
  step_boundary();
  EXPECT_THAT(runner().last_text(), Not(HasSubstr("comparison_direction EQ")));
  EXPECT_THAT(runner().last_text(), HasSubstr("dynamic_slice"));
  const auto each = four().replicas(rows), chunks = four().replicas(padded), halves = four().replicas(of_half),
             sent = four().replicas(from_first);
  for (int64_t r = 0; r < kReplicas; r++) {
    const auto i = static_cast<size_t>(r);
    EXPECT_TRUE(at::equal(each[i], whole.cpu().narrow(0, 2 * r, 2))) << each[i];
    EXPECT_EQ(chunks[i][0].item<float>(), 2 * r + 1);
    EXPECT_EQ(chunks[i][1].item<float>(), r == 3 ? 0 : 2 * r + 2);
    EXPECT_TRUE(at::equal(halves[i], whole.cpu().narrow(0, 4 * (r % 2), 4))) << halves[i];
    EXPECT_TRUE(at::equal(sent[i], whole.cpu().narrow(0, r < 2 ? 1 : 3, 1))) << sent[i];
  }
}

TEST(Communicator, GathersAgainBehindABarrier) {
  const auto own = numbers_of_replicas();
  auto whole = torch::zeros({2 * kReplicas}, own.options()), again = torch::zeros_like(whole);
  auto x = torch::ones_like(own);
  const auto before = x;
  four().all_gather(std::array{Piece{whole, own}}).wait();
  x = x * whole.sum();
  std::array operands{x};
  four().all_gather(std::array{Piece{again, own}}, {}, operands).wait();
  EXPECT_FALSE(operands[0].is_same(x));
  const auto y = operands[0] + again.sum();
  EXPECT_EQ(firsts(four().replicas(y)), std::vector<float>(kReplicas, 24));
  EXPECT_THAT(runner().last_text(), HasSubstr("optimization_barrier"));
}

TEST(Communicator, AddsInTheDtypeInWhichItSends) {
  const auto whole = torch::ones({kReplicas}, torch::TensorOptions(four().traits().device)), own = torch::zeros({1}, whole.options());
  for (const auto wire : {at::kFloat, at::kBFloat16}) {
    const auto before = four().traffic(Operation::ReduceScatter).bytes;
    four().reduce_scatter(std::array{Piece{whole, own}}, {.wire_dtype = wire}).wait();
    EXPECT_EQ(four().traffic(Operation::ReduceScatter).bytes - before, (kReplicas - 1) * c10::elementSize(wire));
    EXPECT_EQ(firsts(four().replicas(own)), std::vector<float>(kReplicas, kReplicas));
  }
  EXPECT_THAT(runner().last_text(), HasSubstr("tensor<4xbf16>) -> tensor<1xbf16>"));
}

TEST(Communicator, RunsWhatHasNoLoweringOnEachReplica) {
  const auto x = numbers_of_replicas() + 1;
  const auto y = torch::igamma(x, torch::ones_like(x));
  const auto values = four().replicas(y);
  for (int replica = 0; replica < kReplicas; replica++) {
    EXPECT_TRUE(at::allclose(values[static_cast<size_t>(replica)], torch::igamma(torch::full({2}, replica + 1.0F), torch::ones(2))));
  }
}

TEST(Communicator, RefusesAChoiceOfOtherCountsOnEachReplica) {
  const auto x = numbers_of_replicas();
  EXPECT_EQ((x.index({x >= 0}).sizes()), at::IntArrayRef({2}));
  EXPECT_THAT(message_of<UsageError>([&] { (void)x.index({x > 0}); }),
              AllOf(HasSubstr("aten::nonzero makes a tensor of sizes [0, 1] on one replica and of sizes [2, 1] on another"), HasSubstr("where()")));
}

TEST(Communicator, GoesOnAfterAProgramThatFails) {
  auto sum = numbers_of_replicas();
  {
    const auto large = torch::ones({int64_t{1} << 41}, sum.options());
    const auto lost = large.sum();
    // A program of several replicas starts without an error; a read of its results throws it.
    EXPECT_THAT(message_of<Error>([&] { (void)lost.item(); }), HasSubstr("Out of memory"));
    EXPECT_THAT(message_of<Error>([&] { (void)(lost + 1).item(); }), HasSubstr("Out of memory"));
  }
  four().all_reduce(sum).wait();
  EXPECT_EQ(firsts(four().replicas(sum)), std::vector<float>(kReplicas, 6));
}

}  // namespace
}  // namespace tessera::xla
