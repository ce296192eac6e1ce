// Ranks that pack different gradients into their slots get an error.
#include "tessera/shard/unit/gradient_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/testing/net.h"
#include "tessera/testing/transports.h"

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
