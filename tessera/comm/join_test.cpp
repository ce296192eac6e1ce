// Joining through a store or a c10d process group that the program already has.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/conformance.h"
#include "tessera/comm/init.h"
#include "tessera/comm/joined_world.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tests/testing/transports.h"

namespace tessera::testing::join_test {
namespace {

c10::intrusive_ptr<c10d::Backend> gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  const auto options = c10d::ProcessGroupGloo::Options::create(kTestLimit);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

TEST(Init, JoinsAProcessGroup) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(3, [&](const Communicator& outer) {
    const auto backend = gloo_backend(store, outer.rank(), outer.size());
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, outer.rank(), outer.size());
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
    const auto world = init(group, {.operation_limit = kTestLimit});
    EXPECT_EQ(world.rank(), outer.rank());
    for (const auto& check : conformance_checks(world)) check.run(world);
    // The program can use the group at the same time as Tessera.
    std::vector<at::Tensor> tensors = {at::full({3}, static_cast<float>(outer.rank()))};
    const auto theirs = backend->allreduce(tensors);
    world.barrier();
    theirs->wait();
    EXPECT_EQ(tensors[0][0].item<float>(), 3);
  });
}

TEST(Init, JoinsAProcessGroupTwice) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(3, [&](const Communicator& outer) {
    const auto backend = gloo_backend(store, outer.rank(), outer.size());
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, outer.rank(), outer.size());
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
    const auto first = init(group, {.operation_limit = kTestLimit});
    const auto half = first.split(std::array{0, 1, 0});
    const auto second = init(group, {.operation_limit = kTestLimit});
    // Operations of both worlds are under way at the same time, and messages of one must not reach the other.
    const auto a = at::full({100}, 1.0F), b = at::full({100}, 10.0F);
    const auto work_a = first.all_reduce(a), work_b = second.all_reduce(b);
    work_b.wait();
    work_a.wait();
    EXPECT_EQ(a[0].item<float>(), 3);
    EXPECT_EQ(b[0].item<float>(), 30);
    half.barrier();
    // The program's group lives on when Tessera's ends with an error, and the error still reaches every rank.
    if (outer.rank() == 1) second.abort("enough of this");
    EXPECT_THAT(message_of<CommError>([&] { second.barrier(); }), ::testing::HasSubstr("enough of this"));
  });
}

TEST(Init, RefusesAGroupWithoutABackendForHostMemory) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 1);
  EXPECT_THAT(message_of<UsageError>([&] { init(group); }), ::testing::HasSubstr("no backend that moves host memory"));
  const c10::intrusive_ptr<c10d::ProcessGroup> none;
  EXPECT_THAT(message_of<UsageError>([&] { init(none); }), ::testing::HasSubstr("null"));
}

TEST(Init, RefusesARankThatDoesNotExist) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(message_of<UsageError>([&] { init(store, 2, 2); }), ::testing::HasSubstr("no rank 2 in a world of 2"));
}

TEST(JoinedWorld, IsTheLastOfTheThreadOrElseOfTheProcess) {
  const auto none = [] { return message_of<UsageError>([] { (void)joined_world(); }); };
  EXPECT_THAT(none(), ::testing::HasSubstr("call init first"));
  {
    const auto first = init(), second = init({.operation_limit = kTestLimit});
    EXPECT_TRUE(joined_world().same_group(second));
    EXPECT_EQ(joined_world().limit(), second.limit());
    std::thread([&] { EXPECT_TRUE(joined_world().same_group(second)); }).join();
  }
  EXPECT_THAT(none(), ::testing::HasSubstr("keep the world"));
}

TEST(JoinedWorld, IsThatOfEachRankOnThreads) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(2, [&](const Communicator& outer) {
    const auto world = init(store, outer.rank(), 2, {.operation_limit = kTestLimit});
    outer.barrier();
    EXPECT_TRUE(joined_world().same_group(world));
    std::thread([] {
      EXPECT_THAT(message_of<UsageError>([] { (void)joined_world(); }), ::testing::HasSubstr("pass the world of this thread's rank"));
    }).join();
    outer.barrier();
  });
}

}  // namespace
}  // namespace tessera::testing::join_test
