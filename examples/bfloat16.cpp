// Trains in bfloat16, with weights and optimizer in float32: tessera launch -n 2 bfloat16
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

int main() {
  const auto world = init();
  torch::manual_seed(1);
  models::Mlp model(models::MlpOptions{.width = 32, .layers = 2, .classes = 4});
  fully_shard(model, {.mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}});
  optim::AdamW optimizer(model->parameters(), {.lr = 3e-3});

  torch::manual_seed(2 + world.rank());  // different batches on every rank
  double last = 0;
  for (int step = 0; step < 100; step++) {
    const auto x = torch::randn({16, 32});
    const auto scores = call(model, x);  // call casts x, and the scores to float32
    const auto loss = torch::cross_entropy_loss(scores, x.slice(1, 0, 4).argmax(1));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  if (world.rank() == 0) std::printf("loss in bfloat16: %.3f\n", last);
}
