// Tensors of a device that go through host memory: the promises of every engine, and the same bits as on the host.
#include "tessera/comm/device/staged_transport.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/conformance.h"
#include "tessera/comm/mesh.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tests/testing/delayed_device.h"
#include "tests/testing/transports.h"

namespace tessera::testing::staged_transport_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void keep_promises(const Communicator& world) {
  EXPECT_EQ(world.traits().device, delayed_device());
  for (const auto& check : conformance_checks(world)) EXPECT_NO_THROW(check.run(world)) << check.operation << " " << check.what;
}

TEST(Staged, KeepsThePromisesOfEveryEngine) {
  const auto device = delayed_device();
  set_lags(false);  // most kernels of this device need values
  for (const int ranks : {1, 2, 3, 4}) run_ranks(ranks, keep_promises, {.limit = kTestLimit, .device = device});
  keep_promises(self_world(0, device));
  set_lags(true);
}

std::vector<at::Tensor> rounded_sums(c10::Device device) {
  std::vector<at::Tensor> sums(3);
  run_ranks(3,
            [&](const Communicator& world) {
              auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(world.rank()));
              const auto whole = at::randn({3 * 501}, generator).to(device);
              const Piece piece{.whole = whole, .own = at::zeros({501}, whole.options())};
              world.reduce_scatter(std::array{piece}, {.op = Reduce::Mean, .wire_dtype = at::kBFloat16}).wait();
              world.all_reduce(whole, {.op = Reduce::Mean}).wait();
              sums[static_cast<size_t>(world.rank())] = at::cat({whole.cpu(), piece.own.cpu()});
            },
            {.limit = kTestLimit, .device = device});
  return sums;
}

TEST(Staged, GivesTheBitsOfTheHost) {
  const auto device = delayed_device();
  set_lags(false);
  const auto expected = rounded_sums(c10::kCPU), found = rounded_sums(device);
  set_lags(true);
  for (size_t rank = 0; rank < expected.size(); rank++) EXPECT_TRUE(at::equal(found[rank], expected[rank])) << "rank " << rank;
}

TEST(Staged, RefusesTensorsThatLieElsewhere) {
  run_ranks(2,
            [](const Communicator& world) {
              EXPECT_THAT(message_of<UsageError>([&] { world.all_reduce(at::ones({4})).wait(); }),
                          AllOf(HasSubstr("is on cpu"), HasSubstr("moves memory of delayed:0")));
            },
            {.limit = kTestLimit, .device = delayed_device()});
}

TEST(Staged, LeavesARankAloneOnTheDevice) {
  run_ranks(2,
            [](const Communicator& world) {
              const Mesh mesh(world, {.replicate = 2, .shard = 1});
              EXPECT_EQ(mesh.shard().traits().device, delayed_device());
              const auto own = at::ones({4}, world.traits().device), whole = at::zeros({4}, world.traits().device);
              const Piece piece{.whole = whole, .own = own};
              mesh.shard().all_gather(std::span(&piece, 1)).wait();
              EXPECT_TRUE(at::equal(whole.cpu(), at::ones({4})));
            },
            {.limit = kTestLimit, .device = delayed_device()});
}

TEST(Staged, PartsOfOneRankGoOnAfterTheirTime) {
  constexpr std::chrono::milliseconds kShort(300);
  set_lags(false);
  run_ranks(3,
            [&](const Communicator& world) {
              const auto part = Mesh::of_groups(world, {{0}, {1, 2}}).shard().with_limit(kShort);
              const auto own = at::ones({4}, world.traits().device), whole = at::zeros({4 * part.size()}, world.traits().device);
              const Piece piece{.whole = whole, .own = own};
              for (int i = 0; i < 2; i++) {
                part.all_gather(std::span(&piece, 1)).wait();
                std::this_thread::sleep_for(2 * kShort);
              }
              EXPECT_TRUE(at::equal(whole.cpu(), at::ones({4 * part.size()})));
            },
            {.limit = kTestLimit, .device = delayed_device()});
  set_lags(true);
}

TEST(Staged, NeedsADeviceThatIsThere) {
  EXPECT_THAT(message_of<ConfigError>([] { self_world(0, c10::Device(c10::kXPU)); }),
              HasSubstr("device xpu: the libtorch of this program does not support"));
  EXPECT_THAT(message_of<ConfigError>([] { self_world(0, c10::Device(delayed_device().type(), 3)); }), HasSubstr("there are 1 here"));
}

}  // namespace
}  // namespace tessera::testing::staged_transport_test
