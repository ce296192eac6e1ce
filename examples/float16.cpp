// Trains in float16, with a scaler that keeps small gradients from becoming zero: tessera launch -n 2 float16
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

int main() {
  const auto world = init();
  torch::manual_seed(1);
  FullyShardedDataParallel model(models::Mlp(models::MlpOptions{.width = 32, .layers = 2, .classes = 4}), world,
                                 {.auto_wrap_policy = wrap_by_size({.min_params = 1000}), .compute_dtype = torch::kHalf});
  optim::AdamW optimizer(model.parameters(), {.lr = 3e-3});
  optim::GradScaler scaler;

  torch::manual_seed(2 + world.rank());  // different batches on every rank
  double last = 0;
  for (int step = 0; step < 100; step++) {
    const auto x = torch::randn({16, 32});
    const auto loss = torch::cross_entropy_loss(model(x).to(torch::kFloat), x.slice(1, 0, 4).argmax(1));
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);  // needed only because the gradients are clipped
    optimizer.clip_grad_norm(1.0);
    scaler.step(optimizer);  // leaves out the step on all ranks if a gradient is inf or NaN on one rank
    scaler.update();
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  if (world.rank() == 0) std::printf("loss in float16: %.3f\n", last);
}
