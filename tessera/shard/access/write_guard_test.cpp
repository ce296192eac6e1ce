// Ranks write their units in different orders, and some write nothing. No order leads to a deadlock.
#include "tessera/shard/access/write_guard.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/blocks.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"

namespace tessera::testing::write_guard_test {
namespace {

constexpr double kRate = 0.1;

/// How a rank ends a round of training.
struct Ending {
  std::string name;
  std::function<void(const std::shared_ptr<Blocks>& model)> act;
  friend std::ostream& operator<<(std::ostream& out, const Ending& ending) { return out << ending.name; }
};

void take_step_of_torch(std::vector<at::Tensor> shards) {
  torch::optim::SGD(std::move(shards), torch::optim::SGDOptions(kRate)).step();
}

std::vector<at::Tensor> reversed(std::vector<at::Tensor> shards) {
  std::ranges::reverse(shards);
  return shards;
}

const Ending kForwards = {"TorchForwards", [](const auto& model) { take_step_of_torch(parameters(*model)); }};
const Ending kBackwards = {"TorchBackwards", [](const auto& model) { take_step_of_torch(reversed(parameters(*model))); }};
const Ending kOurs = {"OursBackwards", [](const auto& model) { optim::SGD(reversed(parameters(*model)), {.lr = kRate}).step(); }};
const Ending kOursForwards = {"OursForwards", [](const auto& model) { optim::SGD(parameters(*model), {.lr = kRate}).step(); }};
const Ending kSkip = {"Skip", [](const auto& model) { skip_step(*model); }};
const Ending kWholes = {"FullParams", [](const auto& model) { const auto guard = full_params(*model, Access::Write); }};

/// Where the shards of each unit lie. They move if ranks had to yield to each other.
std::vector<const void*> places(const Blocks& model) {
  std::vector<const void*> result;
  for (const auto& unit : units(model)) {
    for (const auto& group : unit->groups()) result.push_back(group.own.const_data_ptr());
  }
  return result;
}

class Orders : public ::testing::TestWithParam<std::pair<Ending, Ending>> {};

TEST_P(Orders, DoNotMatter) {
  if (!on_cpu()) GTEST_SKIP() << "where units are gathered, ranks use them in one order";
  const auto& [first, second] = GetParam();
  with_ranks(2, [&](const Communicator& all) {
    const auto world = all.with_limit(std::chrono::seconds(3));
    const auto model = sharded_blocks(world);
    Blocks plain;
    const auto before = places(*model);
    for (int round = 0; round < 4; round++) {
      const auto x = numbers({4, 8}, round);
      EXPECT_TRUE(at::allclose(model->forward(x), plain.forward(x), 1e-5, 1e-6)) << "round " << round;
      model->forward(x).pow(2).mean().backward();
      plain.zero_grad();
      plain.forward(x).pow(2).mean().backward();
      (world.rank() == 0 ? first : second).act(model);
      for (const auto& shard : parameters(*model)) shard.mutable_grad() = at::Tensor();
      // Each rank wrote its own part or left it as it was, so the whole parameters are put together from the parts.
      std::vector<at::Tensor> wholes;
      for (const auto& shard : parameters(*model)) wholes.push_back(full_parameter(shard));
      const torch::NoGradGuard no_grad;
      const auto originals = plain.parameters();
      for (size_t i = 0; i < wholes.size(); i++) originals[i].copy_(wholes[i]);
    }
    // Shards may have to yield only with optimizers of torch::optim, whose operators write units one by one.
    const auto is_guarded = [](const Ending& ending) { return !ending.name.starts_with("Torch"); };
    if (is_guarded(first) || is_guarded(second)) {
      EXPECT_EQ(places(*model), before);
    }
    for (const auto& unit : units(*model)) {
      const auto held = unit->schedule()->lock();
      EXPECT_EQ(unit->state(held).versions.next_version(), 4U) << unit->name();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(OfWrites, Orders,
                         ::testing::Values(std::pair(kForwards, kBackwards), std::pair(kBackwards, kSkip), std::pair(kSkip, kForwards),
                                           std::pair(kOurs, kOursForwards), std::pair(kOurs, kSkip), std::pair(kOurs, kWholes),
                                           std::pair(kWholes, kBackwards), std::pair(kWholes, kSkip)),
                         [](const auto& info) { return info.param.first.name + "And" + info.param.second.name; });

}  // namespace
}  // namespace tessera::testing::write_guard_test
