// Your own model, which computes its activations again in backward: tessera launch -n 2 checkpoint_module
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <memory>

using namespace tessera;

/// Calls its parts through tessera::call, so that each call can be a segment.
struct Stack : torch::nn::Module {
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
  Called<torch::nn::Linear> head{nullptr};
  Stack() {
    for (int i = 0; i < 4; i++) blocks->push_back(torch::nn::Linear(64, 64));
    head = register_module("head", Called<torch::nn::Linear>(64, 4));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& each : *blocks) x = call(each->as<torch::nn::Linear>(), x).relu();  // in place of each->forward(x)
    return head(x);                                                                      // is call(head, x), because head is a Called
  }
};

int main() {
  const auto world = init();
  torch::manual_seed(1);
  const auto model = std::make_shared<Stack>();
  fully_shard(model);
  activation::checkpoint_module(model);  // before or after fully_shard
  const auto loss = torch::cross_entropy_loss(call(model, torch::ones({2, 64})), torch::zeros({2}, torch::kLong));
  loss.backward();
  if (world.rank() == 0) std::printf("loss %.3f\n", loss.item<double>());
}
