// An unmodified module on an XLA device: xla
#include <tessera/xla/init.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  const auto world = tessera::xla::init();  // before the first backward pass
  const auto device = world.traits().device;
  torch::manual_seed(1);
  torch::nn::Linear first(32, 64), last(64, 1);
  torch::nn::Sequential model(first, torch::nn::GELU(), last);
  tessera::xla::to_device(*model);  // Module::to knows only libtorch's own devices
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 100; step++) {
    optimizer.zero_grad();  // gradients that are kept would be results of the program
    const auto x = torch::randn({16, 32}), y = x.sum(1, true);
    const auto loss = (model->forward(x.to(device)) - y.to(device)).pow(2).mean();
    loss.backward();
    optimizer.step();
    tessera::xla::step_boundary();
    if (step % 33 == 0) std::printf("step %d loss %.3f\n", step, loss.item<float>());
  }
}
