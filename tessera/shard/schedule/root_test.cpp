// The root of a model is found by its structure. Tests which modules may be run and trained by themselves, before and after there is a
// root.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/report.h"
#include "tests/testing/blocks.h"
#include "tests/testing/net.h"

namespace tessera::testing::root_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const Unit* root_of(const torch::nn::Module& model) {
  const auto all = units(model);
  const auto found = std::ranges::find_if(all, [](const auto& unit) {
    const auto held = unit->schedule()->lock();
    return unit->state(held).is_root;
  });
  return found == all.end() ? nullptr : found->get();
}

/// One step of the model, and of a copy that is not sharded on any rank, with the same loss.
void expect_same_step(const torch::nn::Module& sharded, const torch::nn::Module& whole, const std::function<at::Tensor(bool, int)>& loss,
                      const Communicator& world) {
  loss(/*of_sharded=*/true, world.rank()).backward();
  for (int rank = 0; rank < world.size(); rank++) (loss(/*of_sharded=*/false, rank) / world.size()).backward();
  const auto shards = parameters(sharded), originals = whole.parameters();
  for (size_t i = 0; i < shards.size(); i++) {
    ASSERT_EQ(shards[i].grad().defined(), originals[i].grad().defined()) << i;
    if (shards[i].grad().defined()) {
      EXPECT_TRUE(at::allclose(full_grad(shards[i]), originals[i].grad(), 1e-5, 1e-6)) << i;
    }
    const torch::NoGradGuard no_grad;
    if (!shards[i].grad().defined()) continue;
    shards[i].sub_(shards[i].grad(), 0.001);
    originals[i].sub_(originals[i].grad(), 0.001);
    shards[i].mutable_grad() = at::Tensor();
    originals[i].mutable_grad() = at::Tensor();
  }
}

TEST(Root, IsTheOutermostUnit) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world});
    ASSERT_NE(root_of(*model), nullptr);
    EXPECT_EQ(root_of(*model)->name(), "RootedBlocks");
    const auto without = std::make_shared<Blocks>();
    for (const auto& each : without->block) fully_shard(each, {.mesh = world});
    fully_shard(without, {.mesh = world});
    EXPECT_EQ(root_of(*without), nullptr) << "no parameter is left for a root";
  });
}

TEST(Root, IsNotNeededBeforeOrAfterAnInnerUnitIsRun) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto residence : {Residence::Gathered, Residence::Auto}) {
      RootedBlocks whole;
      const auto model = sharded_rooted_blocks({.mesh = world, .residence = residence});
      const auto inner_alone = [&](bool of_sharded, int batch) {
        return (of_sharded ? *model : whole).block[1]->forward(numbers({3, 8}, batch)).pow(2).mean();
      };
      const auto all = [&](bool of_sharded, int batch) { return loss_of(of_sharded ? *model : whole, batch); };
      const auto both = [&](bool of_sharded, int batch) {
        auto& of = of_sharded ? *model : whole;
        return loss_of(of, batch) + of.block[2]->forward(numbers({3, 8}, batch + 7)).pow(2).mean();
      };
      expect_same_step(*model, whole, inner_alone, world);
      expect_same_step(*model, whole, all, world);
      expect_same_step(*model, whole, inner_alone, world);
      expect_same_step(*model, whole, both, world);
    }
  });
}

TEST(Root, MayBecomeAnInnerUnitOfALargerModelAfterTraining) {
  with_ranks(2, [](const Communicator& world) {
    struct Larger : torch::nn::Module {
      std::shared_ptr<RootedBlocks> inner;
      torch::nn::Linear outer = nullptr;
      explicit Larger(std::shared_ptr<RootedBlocks> given) {
        inner = register_module("inner", std::move(given));
        outer = register_module("outer", torch::nn::Linear(8, 8));
        const torch::NoGradGuard no_grad;
        outer->weight.copy_(numbers({8, 8}));
        outer->bias.copy_(numbers({8}));
      }
    };
    const auto whole_inner = std::make_shared<RootedBlocks>();
    const auto inner = sharded_rooted_blocks({.mesh = world});
    for (int step = 0; step < 3; step++) {
      expect_same_step(
          *inner, *whole_inner, [&](bool sharded, int batch) { return loss_of(sharded ? *inner : *whole_inner, batch); }, world);
    }
    EXPECT_EQ(root_of(*inner)->name(), "RootedBlocks");
    Larger whole(whole_inner), model(inner);
    fully_shard(model, {.mesh = world});
    EXPECT_EQ(root_of(model)->name(), "Larger");
    EXPECT_EQ(units(*inner).size(), 5);
    EXPECT_EQ(root_of(*inner), nullptr);
    for (int step = 0; step < 3; step++) {
      expect_same_step(
          model, whole,
          [&](bool sharded, int batch) {
            auto& of = sharded ? model : whole;
            return of.outer(of.inner->forward(numbers({3, 8}, batch))).pow(2).mean();
          },
          world);
    }
    EXPECT_THAT([&] { (void)no_sync(*inner); },
                ThrowsMessage<UsageError>(HasSubstr("is only a part of its model, to which unit 'Larger' belongs")));
  });
}

TEST(Root, OfTwoModelsInOneStep) {
  with_ranks(2, [](const Communicator& world) {
    RootedBlocks first_whole, second_whole;
    const auto first = sharded_rooted_blocks({.mesh = world}), second = sharded_rooted_blocks({.mesh = world});
    for (int step = 0; step < 3; step++) {
      const auto x = [&](int batch) { return numbers({3, 8}, batch + step); };
      second->forward(first->forward(x(world.rank()))).pow(2).mean().backward();
      for (int rank = 0; rank < 2; rank++) (second_whole.forward(first_whole.forward(x(rank))).pow(2).mean() / 2).backward();
    }
    expect_same_gradients(*first, first_whole);
    expect_same_gradients(*second, second_whole);
    expect_all_freed(*first);
    expect_all_freed(*second);
  });
}

TEST(Root, MayBeMissingAltogether) {
  with_ranks(2, [](const Communicator& world) {
    RootedBlocks whole;
    const auto model = std::make_shared<RootedBlocks>();
    for (const auto& each : model->block) fully_shard(each, {.mesh = world});
    fully_shard(model->head, {.mesh = world});
    EXPECT_EQ(root_of(*model), nullptr);
    for (int step = 0; step < 3; step++) {
      expect_same_step(*model, whole, [&](bool sharded, int batch) { return loss_of(sharded ? *model : whole, batch); }, world);
    }
    expect_all_freed(*model);
  });
}

TEST(Root, ComesLast) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = std::make_shared<RootedBlocks>();
    fully_shard(model, {.mesh = world});
    EXPECT_THAT([&] { fully_shard(model->block[0], {.mesh = world}); },
                ThrowsMessage<UsageError>(HasSubstr("module Block is sharded already, as a part of unit 'RootedBlocks'")));
    EXPECT_THAT([&] { fully_shard(model, {.mesh = world}); },
                ThrowsMessage<UsageError>(HasSubstr("module RootedBlocks is sharded already")));
  });
}

}  // namespace
}  // namespace tessera::testing::root_test
