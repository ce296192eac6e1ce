// A model of residual blocks for tests that shard it block by block, and a comparison of its gradients with those of an unsharded model.
#pragma once

#include <gtest/gtest.h>

#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/numbers.h"
#include "tests/testing/transports.h"

namespace tessera::testing {

/// held_bytes() returns the memory that a unit has now beyond its shards, and unsharded_bytes() the memory that it has while it is
/// unsharded.
inline uint64_t held_bytes(Unit& unit) {
  const auto held = unit.schedule()->lock();
  return unit.state(held).held_bytes();
}
inline uint64_t unsharded_bytes(Unit& unit) {
  return unit.memory().unsharded_bytes(unit.buffers());
}

struct Block : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  Block() {
    a = register_module("a", torch::nn::Linear(8, 16));
    b = register_module("b", torch::nn::Linear(16, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return x + b(torch::tanh(a(x))); }
};

struct Blocks : torch::nn::Module {
  std::vector<std::shared_ptr<Block>> block;
  explicit Blocks(int count = 4) {
    for (int i = 0; i < count; i++) block.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>()));
    fill_with_numbers(*this);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& each : block) x = each->forward(x);
    return x;
  }
};

/// Blocks and a layer after them.
struct RootedBlocks : Blocks {
  torch::nn::Linear head = register_module("head", torch::nn::Linear(8, 8));
  explicit RootedBlocks(int count = 4) : Blocks(count) { fill_with_numbers(*this); }
  at::Tensor forward(const at::Tensor& x) { return head(Blocks::forward(x)); }
};

/// Makes each block a unit, and the head the root.
inline std::shared_ptr<RootedBlocks> sharded_rooted_blocks(const ShardOptions& options) {
  auto model = std::make_shared<RootedBlocks>();
  for (const auto& each : model->block) fully_shard(each, options);
  fully_shard(model, options);
  return model;
}

/// Makes each block a unit.
inline std::shared_ptr<Blocks> sharded_blocks(const Communicator& world, int max_live_units = 2) {
  const auto model = std::make_shared<Blocks>();
  for (const auto& each : model->block) fully_shard(each, {.mesh = world});
  fully_shard(model, {.mesh = world, .schedule = {.max_live_units = max_live_units}});
  return model;
}

inline at::Tensor loss_of(RootedBlocks& model, int batch) {
  return model.forward(numbers({3, 8}, batch)).pow(2).mean();
}

/// An unsharded model with gradients that are summed over the batches and averaged over the ranks.
inline RootedBlocks whole_after(int ranks, const std::vector<int>& batches) {
  RootedBlocks model;
  for (const int batch : batches) {
    for (int rank = 0; rank < ranks; rank++) (loss_of(model, 10 * batch + rank) / ranks).backward();
  }
  return model;
}

/// Expects the gradients of `sharded` to be those of `unsharded` times `factor`, or zero where `unsharded` has none. Collective.
inline void expect_same_gradients(const torch::nn::Module& sharded, const torch::nn::Module& unsharded, double factor = 1,
                                  double tolerance = 1e-5) {
  const auto shards = parameters(sharded);
  const auto originals = unsharded.parameters();
  ASSERT_EQ(shards.size(), originals.size());
  for (size_t i = 0; i < shards.size(); i++) {
    ASSERT_TRUE(shards[i].grad().defined()) << "parameter " << i;
    const auto& known = originals[i].grad();
    const auto expected = known.defined() ? known * factor : at::zeros_like(originals[i]);
    EXPECT_TRUE(at::allclose(full_grad(shards[i]), expected, tolerance, tolerance / 10)) << "parameter " << i;
  }
}

inline void expect_all_freed(const torch::nn::Module& model) {
  for (const auto& unit : units(model)) {
    const auto held = unit->schedule()->lock();
    EXPECT_FALSE(unit->state(held).has_memory()) << unit->name();
  }
}

}  // namespace tessera::testing
