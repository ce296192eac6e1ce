// A small model for tests that need no particular one.
#pragma once

#include <torch/torch.h>

#include "tessera/shard/fully_shard.h"
#include "tests/testing/transports.h"

namespace tessera::testing {

struct NetImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
  NetImpl() {
    a = register_module("a", torch::nn::Linear(6, 10));
    b = register_module("b", torch::nn::Linear(10, 10));
    c = register_module("c", torch::nn::Linear(10, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return c(torch::tanh(b(torch::tanh(a(x))))); }
};
TORCH_MODULE(Net);

inline Net seeded_net() {
  static std::mutex generator;
  std::lock_guard lock(generator);
  torch::manual_seed(5);
  return Net();
}

inline Net sharded_net(const Communicator& world) {
  auto net = seeded_net();
  for (const auto& child : net->children()) fully_shard(child, {.mesh = world});
  return net;
}

inline void with_ranks(int ranks, const std::function<void(const Communicator&)>& program, const std::vector<int>& host_of = {}) {
  run_world({.transport = "threads", .ranks = ranks, .host_of = host_of}, program);
}

/// A batch. Tests pass the rank as `shift`, so that the ranks have different batches and no rank's gradient equals the mean.
inline at::Tensor input(int shift = 0) {
  return at::arange(18, at::kFloat).view({3, 6}).div(10) + 0.25 * shift;
}

/// The mean of the losses of all ranks. Its gradients in the unsharded model equal those that the sharded model gets.
inline at::Tensor mean_over_ranks(const Communicator& world, const std::function<at::Tensor(int rank)>& loss) {
  auto sum = loss(0);
  for (int rank = 1; rank < world.size(); rank++) sum = sum + loss(rank);
  return sum / world.size();
}

}  // namespace tessera::testing
