// Trains on the GPU with the rank's number, or on the CPU if there is none: tessera launch -n 2 gpu
// Several ranks can share a GPU: their data then goes through host memory.
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  const auto here = torch::cuda::is_available() ? c10::kCUDA : c10::kCPU;
  const auto world = tessera::init({.device = here});
  const auto device = world.traits().device;
  torch::manual_seed(1);
  tessera::models::Mlp model(tessera::models::MlpOptions{.width = 64, .layers = 4, .classes = 8});
  model->to(device);
  for (auto& block : *model->blocks) tessera::fully_shard(block);
  tessera::fully_shard(model);
  tessera::optim::AdamW optimizer(tessera::parameters(*model), {.lr = 3e-3});
  torch::manual_seed(2 + world.rank());
  torch::Tensor loss;
  for (int step = 0; step < 100; step++) {
    const auto inputs = torch::randn({32, 64}, device);
    loss = torch::cross_entropy_loss(model(inputs), inputs.slice(1, 0, 8).argmax(1));
    loss.backward();
    optimizer.clip_grad_norm(1.0);  // nothing in this loop waits for the device
    optimizer.step();
    optimizer.zero_grad();
  }
  const auto last = loss.item<double>();
  if (world.rank() == 0)
    std::printf("%s over %s, ranks: %d, loss %.2f\n", here == c10::kCUDA ? "GPUs" : "CPUs", world.traits().name.c_str(), world.size(),
                last);
}
