// Updates each unit while backward runs, so that no rank keeps gradients: tessera launch -n 2 step_in_backward
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  const auto world = tessera::init();
  torch::manual_seed(1);
  tessera::models::Mlp model(tessera::models::MlpOptions{.width = 64, .layers = 4, .classes = 4});
  tessera::fully_shard(model, {}, tessera::wrap_classes({"Linear"}));
  tessera::optim::AdamW optimizer(model->parameters(), {.lr = 1e-3});

  optimizer.step_in_backward();  // holds until step_after_backward() is called
  const auto x = torch::randn({16, 64}), targets = torch::randint(4, {16}, torch::kLong);
  for (int step = 0; step < 10; step++) {
    const auto loss = torch::cross_entropy_loss(model(x), targets);
    loss.backward();   // sums the gradients of each unit, and updates it in the same pass over memory
    optimizer.step();  // ends the step; there are no gradients to clear
    if (world.rank() == 0 && step == 9) std::printf("loss %.3f\n", loss.item<double>());
  }
}
