// The values with which the parameters of a unit start.
#include "tessera/shard/unit/start_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/unit/fingerprint.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/net.h"

namespace tessera::testing::start_values_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Span kWhole{.numel = 6, .shard_numel = 6};

ManagedParameter on_meta() {
  return {.name = "a", .tensor = at::empty({2, 3}, at::kMeta)};
}

TEST(StartValues, AreThoseOfTheParameterInTheOrderOfMemory) {
  const ShardOptions options{.mesh = self_world()};
  Starts starts(options, "unit");
  const auto values = at::arange(6, at::kFloat);
  const auto found = starts.of({.name = "a", .tensor = values.view({3, 2}).t()}, kWhole);
  starts.expect_all();
  EXPECT_TRUE(at::equal(found.all, values));
  EXPECT_THAT(found.sizes, ElementsAre(2, 3));
  EXPECT_THAT(found.strides, ElementsAre(1, 2));
  EXPECT_EQ(found.fingerprint, fingerprint(values));
}

TEST(StartValues, AreUnknownWhereNobodyMakesThem) {
  for (const auto start : {Start::Equal, Start::Loaded}) {
    const ShardOptions options{.mesh = self_world(), .start = start};
    Starts starts(options, "unit");
    EXPECT_FALSE(starts.of(on_meta(), kWhole).known());
    starts.expect_all();
  }
}

TEST(StartValues, ComeFromTheInitFunctionUntilItFails) {
  int calls = 0;
  const ShardOptions options{.mesh = self_world(), .param_init_fn = [&](const std::string& name, at::Tensor& values) {
                               if (++calls == 2) throw UsageError("no distribution for " + name);
                               values.fill_(3);
                             }};
  Starts starts(options, "unit");
  EXPECT_TRUE(at::equal(starts.of(on_meta(), kWhole).all, at::full({6}, 3.0F)));
  EXPECT_FALSE(starts.of(on_meta(), kWhole).known());
  EXPECT_FALSE(starts.of(on_meta(), kWhole).known());
  EXPECT_EQ(calls, 2);
  EXPECT_THAT(message_of<UsageError>([&] { starts.expect_all(); }), HasSubstr("no distribution for a"));
}

TEST(StartValues, ThatRankZeroLacksAreNamedOnAllRanks) {
  with_ranks(3, [](const Communicator& world) {
    auto net = seeded_net();
    if (world.is_first()) {
      for (auto* parameter : {&net->a->weight, &net->a->bias}) {
        parameter->unsafeGetTensorImpl()->shallow_copy_from(at::empty_like(parameter->detach(), at::kMeta).getIntrusivePtr());
      }
    }
    const auto before = net->b->weight.clone();
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net, {.mesh = world, .start = Start::FromRank0}); }),
                HasSubstr("has no values for 'a.weight', 'a.bias'; make or load"));
    EXPECT_TRUE(at::equal(net->b->weight, before));
  });
}

TEST(StartValues, ThatArriveChangedAreAnErrorOnAllRanks) {
  with_ranks(3, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .start = Start::FromRank0});
    if (world.rank() == 2) const_cast<Unit::Group&>(units(*net).front()->groups().front()).fingerprint++;
    EXPECT_THAT(message_of<DisagreementError>([&] { net(input()); }),
                AllOf(HasSubstr("not those that rank 0 sent. ranks 0 and 1: 'a.weight', 'a.bias', "), HasSubstr("; rank 2: 'a.weight'")));
  });
}

}  // namespace
}  // namespace tessera::testing::start_values_test
