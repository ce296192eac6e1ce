// Shards and optimizer state on disk, and a moving average of the weights: tessera launch -n 2 offload
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  const auto world = tessera::init();
  torch::manual_seed(1);
  tessera::models::Mlp model(tessera::models::MlpOptions{.width = 64, .layers = 4, .classes = 4});
  const tessera::DiskMemoryOptions disk{.folder = ".", .fraction = 0.75};
  tessera::fully_shard(
      model, {.offload = {.parameters = tessera::OffloadTo::Disk, .gradients = tessera::OffloadTo::Disk, .disk = disk}},
      tessera::wrap_classes({"Linear"}));
  tessera::optim::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  optimizer.offload_state(tessera::OffloadTo::Disk, disk);
  tessera::optim::Average average(model.ptr(), {.decay = 0.9});

  const auto x = torch::randn({16, 64}), targets = torch::randint(4, {16}, torch::kLong);
  for (int step = 0; step < 10; step++) {
    torch::cross_entropy_loss(model(x), targets).backward();
    optimizer.step();
    optimizer.zero_grad();
    average.update();
  }
  const auto swapped = average.swapped();  // while `swapped` exists, the model has the average in place of its own weights
  const torch::NoGradGuard no_grad;
  const auto loss = torch::cross_entropy_loss(model(x), targets).item<double>();
  if (world.rank() == 0) std::printf("loss of the average: %.3f\n", loss);
}
