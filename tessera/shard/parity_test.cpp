#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/shard/fully_shard.h"
#include "tessera/testing/replicated.h"
#include "tessera/testing/transports.h"

namespace tessera::testing {
namespace {
namespace nn = torch::nn;

struct NetImpl : nn::Module {
  nn::Linear a{nullptr}, b{nullptr};
  nn::LayerNorm n{nullptr};
  NetImpl() {
    a = register_module("a", nn::Linear(8, 17));
    n = register_module("n", nn::LayerNorm(nn::LayerNormOptions({17})));
    b = register_module("b", nn::Linear(17, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return b(torch::tanh(n(a(x)))); }
};
TORCH_MODULE(Net);

TEST(First, Trains) {
  for (int ranks : {1, 2, 3}) {
    std::mutex m;
    std::vector<std::vector<float>> losses(2 * ranks);
    auto train = [&](const Communicator& world, bool sharded) {
      Net net{nullptr};
      {
        std::lock_guard l(m);
        torch::manual_seed(1);
        net = Net();
      }
      if (sharded) {
        fully_shard(net->a, {.mesh = world});
        fully_shard(net->b, {.mesh = world});
        fully_shard(net, {.mesh = world});
      }
      torch::optim::SGD opt(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      auto gen = at::detail::createCPUGenerator(world.rank());
      for (int i = 0; i < 20; i++) {
        auto x = at::randn({5, 8}, gen);
        auto loss = net(x).pow(2).mean() + net(x * 0.5).sum() * 0.01;
        loss.backward();
        if (!sharded) average_gradients(*net, world);
        opt.step();
        opt.zero_grad();
        losses[2 * world.rank() + sharded].push_back(loss.item<float>());
      }
    };
    run_world({.transport = "threads", .ranks = ranks}, [&](const Communicator& w) {
      train(w, false);
      train(w, true);
    });
    for (int r = 0; r < ranks; r++) EXPECT_EQ(losses[2 * r], losses[2 * r + 1]) << r;
  }
}
}  // namespace
}  // namespace tessera::testing
