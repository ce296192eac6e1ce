// A module that is sharded over four XLA devices, a quarter on each: xla_sharded
// Each device has a quarter of parameters, gradients and optimizer state. One program per step gathers, trains and frees.
#include <tessera/tessera.h>
#include <tessera/xla/init.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  const auto world = tessera::xla::init({.devices = 4});  // before the first backward pass
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(32, 256), torch::nn::GELU(), torch::nn::Linear(256, 256), torch::nn::GELU(),
                              torch::nn::Linear(256, 1));
  tessera::xla::to_device(*model);  // Module::to knows only libtorch's own devices
  fully_shard(*model, {}, tessera::wrap_always());
  tessera::optim::AdamW optimizer(tessera::parameters(*model), {.lr = 3e-3});
  for (int step = 0; step < 100; step++) {
    const auto x = world.from_replicas(torch::randn({16, 32}).chunk(world.size()));
    const auto loss = (model->forward(x) - x.sum(1, true)).pow(2).mean();
    loss.backward();
    optimizer.clip_grad_norm(1.0);
    optimizer.step();
    optimizer.zero_grad();  // the step ends here
    if (step % 33 == 0) {
      std::printf("step %d losses", step);
      for (const auto& value : world.replicas(loss.detach())) std::printf(" %.3f", value.item<float>());
      std::printf("\n");
    }
  }
}
