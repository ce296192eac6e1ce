// A whole program, that of the README: tessera launch -n 2 first
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

// Any torch::nn module, unmodified.
struct NetImpl : torch::nn::Module {
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
  NetImpl() {
    for (int i = 0; i < 4; i++) blocks->push_back(torch::nn::Linear(32, 32));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(32, 1));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) {
      x = x + torch::tanh(block->as<torch::nn::Linear>()->forward(x));
    }
    return head(x);
  }
};
TORCH_MODULE(Net);

int main() {
  // Started by tessera launch, torchrun, mpirun or srun; alone, it is a world of one.
  auto world = tessera::init();
  // The same weights on every rank.
  torch::manual_seed(1);
  Net model;
  for (auto& block : *model->blocks) tessera::fully_shard(block);
  tessera::fully_shard(model);
  tessera::optim::AdamW optimizer(model->parameters(), {.lr = 1e-3});

  // Different batches on every rank.
  torch::manual_seed(2 + world.rank());
  for (int step = 0; step < 100; step++) {
    auto x = torch::randn({16, 32});
    auto loss = (model(x) - x.sum(1, true)).pow(2).mean();
    loss.backward();
    tessera::clip_grad_norm(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (world.rank() == 0 && step % 33 == 0) {
      std::printf("step %d loss %.3f\n", step, loss.item<float>());
    }
  }
  if (world.rank() == 0) std::printf("%s", tessera::describe(*model).c_str());
}
