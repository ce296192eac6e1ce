// One training run for the tests of every engine.
#pragma once

#include <torch/torch.h>

#include "tessera/models/gpt.h"
#include "tessera/tessera.h"

namespace tessera::testing {

/// Gathers parameters and reduces gradients by the engine, not through memory that the ranks share.
inline checkpoint::StateDict trained_gpt(const Communicator& world) {
  auto model = models::Gpt(models::GptOptions{.vocabulary = 64, .width = 32, .layers = 2, .heads = 2, .longest = 16});
  {
    const torch::NoGradGuard no_grad;  // threads share one generator of random numbers, so there are none here
    for (auto& value : model->parameters()) {
      value.copy_(at::arange(value.numel(), at::kFloat).add(value.numel()).sin().mul(0.1).view(value.sizes()));
    }
  }
  const ShardOptions options{.mesh = world, .residence = Residence::Gathered};
  for (const auto& block : *model->blocks) fully_shard(*block, options);
  fully_shard(model, options);
  optim::AdamW optimizer(model->parameters(), {.lr = 1e-2});
  for (int64_t step = 0; step < 3; step++) {
    const auto tokens = (at::arange(32, at::kLong).view({2, 16}) * (world.rank() + 3) + step).remainder(64);
    model->forward(tokens).log_softmax(-1).select(-1, 5).mean().neg().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return checkpoint::full_state_dict(*model);
}

}  // namespace tessera::testing
