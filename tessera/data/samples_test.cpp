#include "tessera/data/samples.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::data::samples_test {
namespace {

TEST(Samples, ArePickedByNumber) {
  const Samples all{.inputs = at::arange(12).view({4, 3}), .targets = at::arange(4)};
  const std::vector<int64_t> numbers = {3, 0, 3};
  const auto some = pick(all, numbers);
  EXPECT_EQ(some.size(), 3);
  EXPECT_TRUE(some.targets.equal(at::arange(4).index_select(0, at::tensor({3, 0, 3}))));
  EXPECT_TRUE(some.inputs[2].equal(all.inputs[3]));
  EXPECT_ANY_THROW(pick(all, std::vector<int64_t>{4}));
}

TEST(FakeImages, AreTheSameForTheSameOptions) {
  const auto first = fake_images({.count = 100, .seed = 3}), again = fake_images({.count = 100, .seed = 3});
  EXPECT_EQ(first.inputs.sizes(), (at::IntArrayRef{100, 28, 28}));
  EXPECT_EQ(first.inputs.scalar_type(), at::kByte);
  EXPECT_EQ(first.targets.scalar_type(), at::kByte);
  EXPECT_TRUE(first.inputs.equal(again.inputs) && first.targets.equal(again.targets));
  EXPECT_FALSE(first.inputs.equal(fake_images({.count = 100, .seed = 4}).inputs));
  EXPECT_FALSE(first.inputs.equal(fake_images({.count = 100, .split = Split::Test, .seed = 3}).inputs));
}

// A model that is trained on one split fits the other: the nearest image has the right class.
TEST(FakeImages, HaveSomethingToLearn) {
  const auto known = fake_images({.count = 300, .classes = 5}), asked = fake_images({.count = 100, .classes = 5, .split = Split::Test});
  const auto flat = [](const Samples& samples) { return samples.inputs.to(at::kFloat).flatten(1); };
  const auto nearest = at::cdist(flat(asked), flat(known)).argmin(1);
  EXPECT_TRUE(known.targets.index_select(0, nearest).equal(asked.targets));
  EXPECT_EQ(std::get<0>(at::_unique(asked.targets)).numel(), 5);
}

TEST(FakeImages, RefuseWhatCanNotBeMade) {
  EXPECT_THAT(testing::message_of<UsageError>([] { fake_images({.classes = 1000}); }), ::testing::HasSubstr("1000 classes"));
}

}  // namespace
}  // namespace tessera::data::samples_test
