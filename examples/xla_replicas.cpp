// An unmodified module on four XLA devices, each with a quarter of the batch: xla_replicas
#include <tessera/xla/init.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  const auto world = tessera::xla::init({.devices = 4});  // before the first backward pass
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(32, 64), torch::nn::GELU(), torch::nn::Linear(64, 1));
  tessera::xla::to_device(*model);  // Module::to knows only libtorch's own devices
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 100; step++) {
    optimizer.zero_grad();  // gradients that are kept would be results of the program
    const auto x = world.from_replicas(torch::randn({16, 32}).chunk(world.size()));
    const auto loss = (model->forward(x) - x.sum(1, true)).pow(2).mean();
    loss.backward();
    for (const auto& parameter : model->parameters()) {
      world.all_reduce(parameter.grad(), {.op = tessera::Reduce::Mean}).wait();
    }
    optimizer.step();
    world.step_done();
    if (step % 33 == 0) {
      std::printf("step %d losses", step);
      for (const auto& value : world.replicas(loss.detach())) std::printf(" %.3f", value.item<float>());
      std::printf("\n");
    }
  }
}
