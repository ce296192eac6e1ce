// How gradients become a mean. Tested on a unit with a fake memory that only records the calls to it.
#include "tessera/shard/gradients/gradient_reduction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/fake_unit.h"

namespace tessera::testing::gradient_reduction_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Records its calls. Waiting for a reduction copies the packed gradients to the piece's `own`, or fails if `fails` is set.
class NotingPacking final : public GradientPacking {
 public:
  explicit NotingPacking(Notes& notes) : notes_(notes) {}

  bool packs_after_sum() override { return false; }
  GradientBuffers buffers(std::span<const GradientPlan> plans) override {
    GradientBuffers result;
    for (const auto& plan : plans) result.buffers.push_back(at::full({plan.numel}, 7, plan.dtype));
    return result;
  }
  void pack(std::span<const at::Tensor> places, std::span<const at::Tensor> gradients) const override {
    for (size_t i = 0; i < places.size(); i++) {
      notes_.push_back("pack");
      places[i].copy_(gradients[i]);
    }
  }
  Works reduce(std::span<const Piece> pieces, const Subject& /*subject*/, Reduce op, TakeMean /*take*/) override {
    notes_.push_back(op == Reduce::Mean ? "mean" : "sum");
    return {Work(std::make_shared<Copy>(pieces.front(), notes_, fails))};
  }

  bool fails = false;

 private:
  struct Copy final : Work::State {
    Copy(Piece of, Notes& to, bool will_fail) : piece(std::move(of)), notes(to), fails(will_fail) {}
    void wait() override {
      notes.push_back("wait");
      if (fails) throw CommError("a rank is gone");
      piece.own.copy_(piece.whole);
    }
    bool done() const override { return false; }

    Piece piece;
    Notes& notes;
    bool fails;
  };

  Notes& notes_;
};

class Reduced : public ::testing::Test {
 protected:
  Reduced() {
    auto own = std::make_unique<NotingPacking>(notes_);
    packing_ = own.get();
    fake_.unit->memory().gradients = std::move(own);
  }
  const Unit::Group& group() const { return fake_.unit->groups().front(); }
  UnitState& state() { return fake_.unit->state(held_); }
  void start(const at::Tensor& gradient) {
    const auto* const only = &group();
    const auto* const parameter = &only->parameters.front();
    auto packing = state().reduction.begin(std::span(&only, 1), /*sums=*/false);
    packing.pack(0, std::span(&parameter, 1), std::span(&gradient, 1));
    packing.start("a", /*members=*/1);
  }
  /// The results of the last reduction: the gradient, and the padding of the chunk.
  at::Tensor gradient() { return state().reduction.target(group())->memory_view(at::kFloat).narrow(0, 0, 4); }
  at::Tensor padding() { return state().reduction.target(group())->memory_view(at::kFloat).slice(0, 4); }

  Notes notes_;
  const std::shared_ptr<Schedule> schedule_ =
      std::make_shared<Schedule>(ScheduleSettings({.mesh = self_world()}, /*is_model=*/true, /*is_divided=*/false));
  const FakeUnit fake_{"a", notes_, *schedule_};
  const ScheduleLock held_ = schedule_->lock();
  NotingPacking* packing_;
};

TEST_F(Reduced, IsCompleteOnceSomebodyHasWaited) {
  const auto values = at::arange(4, at::kFloat);
  start(values);
  EXPECT_TRUE(fake_.unit->flags().is_reducing);
  EXPECT_THAT(notes_, ElementsAre("pack", "mean"));
  state().reduction.finish();
  state().reduction.finish();
  EXPECT_FALSE(fake_.unit->flags().is_reducing);
  EXPECT_THAT(notes_, ElementsAre("pack", "mean", "wait"));
  EXPECT_TRUE(at::equal(gradient(), values));
  EXPECT_TRUE(at::equal(padding(), at::zeros_like(padding())));
  EXPECT_EQ(fake_.unit->counters().reductions, 1);
}

TEST_F(Reduced, TakesZerosForParametersWithoutGradient) {
  start({});
  state().reduction.finish();
  EXPECT_THAT(notes_, ElementsAre("mean", "wait"));
  EXPECT_TRUE(at::equal(gradient(), at::zeros({4})));
}

TEST_F(Reduced, FinishesBeforeTheNextBegins) {
  start(at::ones({4}));
  start(at::full({4}, 2.0F));
  EXPECT_THAT(notes_, ElementsAre("pack", "mean", "wait", "pack", "mean"));
  state().reduction.finish();
  EXPECT_TRUE(at::equal(gradient(), at::full({4}, 2.0F)));
}

TEST_F(Reduced, DividesBeforeAndAfterTheSum) {
  state().settings.divide = {.pre = 2, .post = 4};
  start(at::full({4}, 24.0F));
  EXPECT_THAT(notes_, ElementsAre("pack", "sum"));
  state().reduction.finish();
  EXPECT_TRUE(at::equal(gradient(), at::full({4}, 3.0F)));
}

TEST_F(Reduced, LeavesTheSumToAHook) {
  state().settings.reduction_hook = [](const auto& given) { given.shard.copy_(given.whole * 10); };
  start(at::ones({4}));
  state().reduction.finish();
  EXPECT_THAT(notes_, ElementsAre("pack"));
  EXPECT_TRUE(at::equal(gradient(), at::full({4}, 10.0F)));
}

TEST_F(Reduced, IsNotANumberIfItFails) {
  packing_->fails = true;
  start(at::ones({4}));
  EXPECT_THROW(state().reduction.finish(), CommError);
  EXPECT_FALSE(fake_.unit->flags().is_reducing);
  EXPECT_TRUE(gradient().isnan().all().item<bool>());
}

TEST_F(Reduced, IsForgottenIfItIsAbandoned) {
  start(at::ones({4}));
  notes_.clear();
  state().reduction.abandon();
  state().reduction.finish();
  EXPECT_THAT(notes_, IsEmpty());
  EXPECT_FALSE(fake_.unit->flags().is_reducing);
}

}  // namespace
}  // namespace tessera::testing::gradient_reduction_test
