// Deferred tensors without a module: how they are recorded, and how they and their aliases get values.
#include "tessera/shard/deferred/values.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/shard/deferred/recording.h"
#include "tessera/shard/paging/paging.h"
#include "tests/testing/numbers.h"
#include "tests/testing/transports.h"

namespace tessera::testing::deferred_values_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Deferred : public ::testing::Test {
 protected:
  Deferred() { install_paging(); }

  at::Tensor made(const std::function<at::Tensor()>& make) const {
    const Recording recording(tape_);
    return make();
  }
  /// Names a tensor as deferred_init names a parameter.
  static void name(const at::Tensor& tensor, const std::string& name) {
    deferred_storage(tensor)->kind = DeferredStorage::Kind::Parameter;
    deferred_storage(tensor)->name = name;
  }

  const std::shared_ptr<Tape> tape_ = std::make_shared<Tape>(std::nullopt);
};

TEST_F(Deferred, LackValuesUntilTheyAreComputed) {
  const auto x = made([] { return at::arange(6, at::kFloat).view({2, 3}).mul(2); });
  name(x, "x");
  EXPECT_TRUE(lacks_values(x) && has_recipe(x) && may_be_deferred());
  EXPECT_EQ(device_of_values(x, at::kMeta), at::kCPU);
  EXPECT_TRUE(at::equal(computed_values(x), at::arange(6, at::kFloat).view({2, 3}).mul(2)));
  EXPECT_TRUE(lacks_values(x));
  EXPECT_THAT(message_of<UsageError>([&] { numbers({2, 3}).add(x); }),
              AllOf(HasSubstr("aten::add needs the values of parameter 'x'"), HasSubstr("deferred_init")));
}

TEST_F(Deferred, GiveValuesToTheirAliases) {
  const auto x = made([] { return at::zeros({4}); });
  name(x, "x");
  const auto alias = x.view({2, 2});
  give_values(x, numbers({4}));
  EXPECT_TRUE(lacks_values(alias));
  EXPECT_TRUE(at::equal(alias + 0, numbers({4}).view({2, 2})));  // finds them at its next use
  EXPECT_EQ(alias.data_ptr(), x.data_ptr());
}

TEST_F(Deferred, ThatNobodyNamedGetTheirValuesAtTheirFirstUse) {
  const auto x = made([] { return at::ones({3}).mul(3); });
  EXPECT_EQ(x.sum().item<float>(), 9);
  EXPECT_FALSE(lacks_values(x));
}

TEST_F(Deferred, OfTheMetaDeviceHaveNoRecipeAndAName) {
  const auto x = at::empty({3}, at::kMeta);
  EXPECT_TRUE(lacks_values(x) && !has_recipe(x));
  EXPECT_FALSE(materialize(x, DeferredStorage::Kind::Parameter, "layer.weight", {}, at::kCPU));
  EXPECT_THAT(message_of<UsageError>([&] { x.add(1); }), HasSubstr("'layer.weight'"));
  const auto fill = [](const auto&, at::Tensor& values) { values.fill_(2); };
  EXPECT_TRUE(materialize(x, DeferredStorage::Kind::Parameter, "layer.weight", fill, at::kCPU));
  EXPECT_TRUE(at::equal(x, at::full({3}, 2.0f)));
}

TEST_F(Deferred, TakeNoValuesOfAnotherShape) {
  const auto x = made([] { return at::zeros({4}); });
  const auto wrong = [](const auto&, at::Tensor& values) { values = at::ones({2, 2}); };
  EXPECT_THAT(message_of<UsageError>([&] { materialize(x, DeferredStorage::Kind::Parameter, "x", wrong, at::kCPU); }),
              AllOf(HasSubstr("a tensor of [2, 2] for 'x'"), HasSubstr("the shape [4]")));
}

TEST(DeferredStorage, IsCountedAsLongAsATensorHasIt) {
  install_paging();
  const auto before = detail::deferring.load();
  {
    const auto tape = std::make_shared<Tape>(std::nullopt);
    at::Tensor x;
    {
      const Recording recording(tape);
      x = at::zeros({2});
      EXPECT_EQ(Recording::tape(), tape);
    }
    EXPECT_EQ(Recording::tape(), nullptr);
    EXPECT_GT(detail::deferring.load(), before);
  }
  EXPECT_EQ(detail::deferring.load(), before);
}

}  // namespace
}  // namespace tessera::testing::deferred_values_test
