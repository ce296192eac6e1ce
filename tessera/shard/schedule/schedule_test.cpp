// When units are unsharded and resharded. Tested on units with a fake memory that only records the calls to it.
#include "tessera/shard/schedule/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/fake_unit.h"

namespace tessera::testing::schedule_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Scheduled : public ::testing::Test {
 protected:
  /// Uses a unit as an operator does.
  void use(FakeUnit& fake) {
    Unit* const units[] = {fake.unit.get()};
    schedule_->use(units, {});
    schedule_->release(units);
  }
  /// A complete forward pass without gradients.
  void evaluate() {
    const torch::NoGradGuard no_grad;
    for (auto* fake : {&a_, &b_, &c_}) use(*fake);
  }
  /// The units that were unsharded since the last call.
  Notes unsharded() {
    Notes result;
    for (const auto& note : std::exchange(notes_, {})) {
      if (note.starts_with("unshard ")) result.push_back(note.substr(8));
    }
    return result;
  }
  std::string live() const {
    std::string result;
    for (const auto* fake : {&a_, &b_, &c_}) {
      if (fake->is_unsharded()) result += fake->unit->name();
    }
    return result;
  }

  Notes notes_;
  const std::shared_ptr<Schedule> schedule_ = std::make_shared<Schedule>(
      ScheduleSettings({.mesh = self_world(), .schedule = {.max_live_units = 2}}, /*is_model=*/true, /*is_divided=*/false));
  FakeUnit a_{"a", notes_, *schedule_}, b_{"b", notes_, *schedule_}, c_{"c", notes_, *schedule_};
};

TEST_F(Scheduled, KeepsNoMoreUnitsThanAllowed) {
  use(a_);
  use(b_);
  EXPECT_EQ(live(), "ab");
  use(c_);
  EXPECT_EQ(live(), "bc");
  EXPECT_EQ(schedule_->live_counters().live_bytes, 2 * b_.unit->memory().unsharded_bytes(b_.unit->buffers()));
}

TEST_F(Scheduled, UnshardsAheadOnceItKnowsTheOrder) {
  evaluate();
  EXPECT_THAT(unsharded(), ElementsAre("a", "b", "c"));
  evaluate();
  evaluate();
  (void)unsharded();
  const auto misses = schedule_->misses();
  {
    const torch::NoGradGuard no_grad;
    use(a_);
    EXPECT_THAT(unsharded(), ElementsAre("a", "b"));
    use(b_);
    EXPECT_THAT(unsharded(), ElementsAre("c"));
    use(c_);
  }
  EXPECT_EQ(schedule_->misses(), misses);
}

TEST_F(Scheduled, LeavesPinnedUnitsAlone) {
  Unit* const pinned[] = {a_.unit.get()};
  schedule_->use(pinned, {});
  use(b_);
  use(c_);
  EXPECT_EQ(live(), "ac");
  EXPECT_THROW(schedule_->expect_writable(*a_.unit), UsageError);
  schedule_->release(pinned);
  EXPECT_NO_THROW(schedule_->expect_writable(*a_.unit));
}

TEST_F(Scheduled, LeavesNothingBehindWhenMemoryFails) {
  b_.chunks->fails = true;
  Unit* const both[] = {a_.unit.get(), b_.unit.get()};
  EXPECT_THROW(schedule_->use(both, {}), CommError);
  EXPECT_FALSE(a_.unit->flags().is_pinned());
  EXPECT_FALSE(b_.is_unsharded());
  b_.chunks->fails = false;
  use(b_);
  EXPECT_TRUE(b_.is_unsharded());
}

TEST_F(Scheduled, PublishesAllThatWasWrittenBeforeItReads) {
  use(a_);
  use(b_);
  for (auto* fake : {&a_, &b_}) {
    const auto held = schedule_->lock();
    fake->unit->state(held).versions.wait_to_write(WriteKind::Operators);
    schedule_->note_written(*fake->unit);
  }
  notes_.clear();
  use(c_);
  EXPECT_THAT(notes_, ElementsAre("copy b 1", "copy a 1", "copy c 0", "unshard c"));
}

TEST_F(Scheduled, ForgetsUnitsThatEnd) {
  {
    FakeUnit d("d", notes_, *schedule_);
    use(d);
    EXPECT_GT(schedule_->live_counters().live_bytes, 0);
  }
  EXPECT_EQ(schedule_->live_counters().live_bytes, 0);
  use(a_);
  EXPECT_EQ(live(), "a");
}

TEST_F(Scheduled, GivesUnitsToTheScheduleOfALargerModel) {
  use(a_);
  const auto larger =
      std::make_shared<Schedule>(ScheduleSettings({.mesh = self_world()}, /*is_model=*/true, /*is_divided=*/false));
  larger->take_over(*a_.unit);
  EXPECT_EQ(a_.unit->schedule(), larger);
  EXPECT_FALSE(a_.is_unsharded());
  const auto held = schedule_->lock();
  EXPECT_THROW(a_.unit->state(held), std::logic_error);
}

}  // namespace
}  // namespace tessera::testing::schedule_test
