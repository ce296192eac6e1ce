// Slots give the mean of what the ranks pack; ranks that pack different gradients get an error.
#include "tessera/shard/memory/gradient_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tests/testing/net.h"
#include "tests/testing/transports.h"

namespace tessera::testing::gradient_slots_test {
namespace {

using ::testing::HasSubstr;

constexpr auto kLimit = std::chrono::seconds(5);

/// Lays buffers of these sizes into a slot, and waits for their mean.
std::vector<at::Tensor> mean_of(GradientSlots& slots, const Communicator& world, const std::vector<int64_t>& sizes, double value) {
  std::vector<GradientPlan> plans;
  for (const auto size : sizes) plans.push_back({.numel = size, .dtype = at::kFloat, .device = at::kCPU});
  std::vector<at::Tensor> result;
  const auto packed = slots.buffers(plans, kLimit);
  std::vector<Piece> pieces;
  for (const auto& buffer : packed.buffers) {
    result.push_back(at::empty({buffer.numel() / world.size()}));
    pieces.push_back({.whole = buffer.fill_(value), .own = result.back()});
  }
  slots.reduce(GradientSlots::make_turn(), pieces, {.unit = "layers.3"}, kLimit).wait();
  return result;
}

TEST(GradientSlots, AreOneForAllUsersOfAGroup) {
  with_ranks(2, [](const Communicator& world) {
    const auto slots = GradientSlots::of(world);
    EXPECT_EQ(slots, GradientSlots::of(world.with_limit(kLimit)));
    EXPECT_NE(slots, GradientSlots::of(world.duplicate()));
  });
}

TEST(GradientSlots, GiveTheMeanOfEachTurn) {
  with_ranks(2, [](const Communicator& world) {
    const auto slots = GradientSlots::of(world);
    for (int turn = 0; turn < 5; turn++) {
      const auto means = mean_of(*slots, world, {4, 2}, world.rank() + turn);
      EXPECT_TRUE(at::equal(means[0], at::full({2}, turn + 0.5)));
      EXPECT_TRUE(at::equal(means[1], at::full({1}, turn + 0.5)));
    }
  });
}

struct TwoTurns {
  const void *first, *second;  // the addresses of the two turns' buffers
  bool added_up;               // whether the first turn was added up by the time the second could be packed
};

/// Packs `size` values, and then as many again without waiting for the mean of the first.
TwoTurns two_turns(GradientSlots& slots, const Communicator& world, int64_t size) {
  const GradientPlan plan{.numel = size, .dtype = at::kFloat, .device = at::kCPU};
  const auto mean = at::empty({size / world.size()});
  TwoTurns turns{};
  Work work = [&] {
    const auto packed = slots.buffers({&plan, 1}, kLimit);
    turns.first = packed.buffers[0].const_data_ptr();
    const Piece piece{.whole = packed.buffers[0].fill_(world.rank()), .own = mean};
    return slots.reduce(GradientSlots::make_turn(), {&piece, 1}, {.unit = "layers.3"}, kLimit);
  }();
  turns.second = slots.buffers({&plan, 1}, kLimit).buffers[0].const_data_ptr();
  turns.added_up = work.done();
  work.wait();
  EXPECT_TRUE(at::equal(mean, at::full_like(mean, 0.5)));
  return turns;
}

TEST(GradientSlots, AreTwoForEachRankUnlessTheyAreLarge) {
  with_ranks(2, [](const Communicator& world) {
    const auto slots = GradientSlots::of(world);
    const auto small = two_turns(*slots, world, 1024);
    EXPECT_NE(small.first, small.second);
    EXPECT_FALSE(small.added_up);
    EXPECT_FALSE(slots->packs_after_sum());
    const int64_t large_size = GradientSlots::kLargeSlot / sizeof(float);
    const auto large = two_turns(*slots, world, large_size);
    EXPECT_EQ(large.first, large.second);
    EXPECT_TRUE(large.added_up);
    EXPECT_TRUE(slots->packs_after_sum());
    EXPECT_TRUE(at::equal(mean_of(*slots, world, {large_size}, world.rank())[0].slice(0, -3), at::full({3}, 0.5))) << "and go on";
  });
}

TEST(GradientSlots, RefuseOtherSizesWithTheSameTotal) {
  with_ranks(2, [](const Communicator& world) {
    const auto slots = GradientSlots::of(world);
    const std::vector<int64_t> sizes = world.rank() == 0 ? std::vector<int64_t>{64, 128} : std::vector<int64_t>{128, 64};
    const auto words = message_of<DisagreementError>([&] { mean_of(*slots, world, sizes, 1); });
    EXPECT_THAT(words, HasSubstr("reduce_scatter of 'layers.3'"));
    EXPECT_TRUE(at::equal(mean_of(*slots, world, {2}, 3)[0], at::full({1}, 3.0))) << "and go on";
  });
}

}  // namespace
}  // namespace tessera::testing::gradient_slots_test
