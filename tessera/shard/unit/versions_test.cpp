// When shards may be written, and when other ranks see the write. Tested on a fake memory that only records the calls to it.
#include "tessera/shard/unit/versions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/fake_unit.h"

namespace tessera::testing::versions_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class VersionsOfAUnit : public ::testing::Test {
 protected:
  VersionsOfAUnit() {
    versions_.publish(fake_.unit->buffers());
    notes_.clear();
  }

  Notes notes_;
  const std::shared_ptr<Schedule> schedule_ =
      std::make_shared<Schedule>(ScheduleSettings({.mesh = self_world()}, /*is_model=*/true, /*is_divided=*/false));
  FakeUnit fake_{"a", notes_, *schedule_};
  Versions versions_{*fake_.unit};
};

TEST_F(VersionsOfAUnit, WaitForReadersOnceAndArePublishedOnce) {
  versions_.done_reading();
  versions_.wait_to_write(WriteKind::Update);
  versions_.wait_to_write(WriteKind::Update);
  EXPECT_EQ(versions_.next_version(), 1);
  versions_.publish();
  versions_.publish();
  EXPECT_THAT(notes_, ElementsAre("done a 0", "wait a 0", "copy a 1"));
}

TEST_F(VersionsOfAUnit, NeedNoCopyWhereTheOptimizerHasWrittenIt) {
  versions_.wait_to_write(WriteKind::UpdateWithCopies);
  versions_.publish();
  EXPECT_THAT(notes_, ElementsAre("wait a 0", "publish a 1"));
}

TEST_F(VersionsOfAUnit, CountASkippedStep) {
  versions_.skip();
  versions_.publish();
  EXPECT_THAT(notes_, ElementsAre("done a 0", "publish a 1"));
  EXPECT_EQ(versions_.next_version(), 1);
}

TEST_F(VersionsOfAUnit, MoveTheShardsAwayWhereAllRanksWaitForEachOther) {
  fake_.turns->readers = [] { return false; };
  const auto* const before = fake_.unit->groups().front().own.const_data_ptr();
  versions_.wait_to_write(WriteKind::Update);
  EXPECT_TRUE(versions_.publishes_later());
  EXPECT_NE(fake_.unit->groups().front().own.const_data_ptr(), before);
  EXPECT_TRUE(at::equal(fake_.unit->groups().front().own.narrow(0, 0, 4), at::ones({4})));
  versions_.publish();
  notes_.clear();
  versions_.wait_to_write(WriteKind::Update);  // the shards have moved for good, so a write waits for nobody from now on
  EXPECT_THAT(notes_, ElementsAre("done a 1"));
}

TEST_F(VersionsOfAUnit, KnowThatAStepBrokeOff) {
  fake_.turns->readers = []() -> bool { throw TimeoutError("late"); };
  EXPECT_THROW(versions_.wait_to_write(WriteKind::Update), TimeoutError);
  EXPECT_FALSE(versions_.write_broke_off());  // Tessera's optimizers can repeat the step
  EXPECT_THROW(versions_.wait_to_write(WriteKind::Operators), TimeoutError);
  EXPECT_TRUE(versions_.write_broke_off());
  EXPECT_EQ(versions_.next_version(), 0);
}

TEST_F(VersionsOfAUnit, SeeWritesThroughAnOldPointer) {
  versions_.hand_out_pointer();
  EXPECT_NO_THROW(versions_.expect_untouched());
  at::Tensor(fake_.unit->groups().front().own).fill_(2);
  EXPECT_THROW(versions_.expect_untouched(), UsageError);
}

TEST_F(VersionsOfAUnit, AskNobodyWhereNobodyReadsInPlace) {
  fake_.unit->memory().turns = std::make_unique<Turns>();
  versions_.done_reading();
  versions_.wait_to_write(WriteKind::Update);
  versions_.publish();
  EXPECT_THAT(notes_, IsEmpty());
  EXPECT_EQ(versions_.next_version(), 1);
}

}  // namespace
}  // namespace tessera::testing::versions_test
