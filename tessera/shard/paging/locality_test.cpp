// Local values, which are computed from shards. Tested on a unit with a fake memory that only records the calls to it.
#include "tessera/shard/paging/locality.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/fake_unit.h"
#include "tests/testing/net.h"

namespace tessera::testing::locality_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const OperatorFacts& facts(const char* name, const char* overload) {
  return facts_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
}

class Locality : public ::testing::Test {
 protected:
  void expect_mixing_refused(const char* name, const char* overload, const std::string& why) const {
    const auto& op = facts(name, overload);
    const auto kind = op.kind(c10::DispatchKeySet(c10::DispatchKey::CPU));
    EXPECT_THAT(message_of<UsageError>([&] { expect_no_mixing(op, kind, *source_); }),
                AllOf(HasSubstr(name), HasSubstr(why), HasSubstr("'a'")));
  }

  Notes notes_;
  const std::shared_ptr<Schedule> schedule_ =
      std::make_shared<Schedule>(ScheduleSettings({.mesh = self_world()}, /*is_model=*/true, /*is_divided=*/false));
  const FakeUnit fake_{"a", notes_, *schedule_};
  const at::Tensor shard_ = fake_.unit->groups().front().parameters.front().shard;
  const SourceParameterPtr source_ = source_of(shard_, tag_of(shard_));
};

TEST_F(Locality, IsKnownOfShardsAndOfMarkedResultsAlone) {
  ASSERT_TRUE(source_);
  const auto other = at::ones({4});
  EXPECT_FALSE(source_of(other, tag_of(other)));
  Stack results{at::ones({4}), 3, at::ones({4})};
  mark_results(results, 1, source_);
  EXPECT_FALSE(is_paged(results[0].toTensor()));
  const auto marked = results[2].toTensor();
  EXPECT_TRUE(is_paged(marked));
  EXPECT_EQ(tag_of(marked), nullptr);
  EXPECT_EQ(source_of(marked, nullptr), source_);
}

TEST_F(Locality, AllowsWhatWorksPlaceByPlace) {
  const auto& add = facts("aten::add", "Tensor");
  expect_no_mixing(add, add.kind(c10::DispatchKeySet(c10::DispatchKey::CPU)), *source_);
  expect_same_places(add, {shard_, at::ones({4}), 1}, 0, *source_);
  expect_same_places(add, {shard_, at::ones({}), 1}, 0, *source_);
  expect_all_values(add, 4, {at::ones({2, 2})}, 0, *source_);
}

TEST_F(Locality, RefusesWhatMixesPlaces) {
  expect_mixing_refused("aten::sum", "dim_IntList", "would be the result of this rank alone");
  expect_mixing_refused("aten::bernoulli", "", "would draw numbers for this rank's part");
  const auto& add = facts("aten::add", "Tensor");
  const auto places = HasSubstr("picks values by their places, but the shard of");
  EXPECT_THAT(message_of<UsageError>([&] { expect_same_places(add, {shard_, at::ones({3}), 1}, 0, *source_); }), places);
  EXPECT_THAT(message_of<UsageError>([&] { expect_all_values(add, 4, {at::ones({2})}, 0, *source_); }), places);
}

TEST_F(Locality, RefusesToHideLocalValuesInAView) {
  const auto whole = at::ones({2, 4});
  EXPECT_THAT(message_of<UsageError>([&] { expect_same_places(facts("aten::copy_", ""), {whole[0], shard_, false}, 0, *source_); }),
              HasSubstr("into a view of an ordinary tensor"));
}

}  // namespace
}  // namespace tessera::testing::locality_test
