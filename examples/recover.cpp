// Goes on after an exception in one rank's pass: all ranks abandon the pass and take the next batch.
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>

int main() {
  const auto world = tessera::init();
  torch::manual_seed(1);
  tessera::models::Mlp model(tessera::models::MlpOptions{.width = 32, .layers = 2, .classes = 4});
  tessera::fully_shard(model, {.mesh = world});
  tessera::optim::SGD optimizer(model->parameters(), {.lr = 0.1});

  int steps = 0;
  for (int batch = 0; batch < 6; batch++) {
    try {
      const auto scores = model(torch::randn({4, 32}));
      if (batch == 2 && world.rank() == world.size() - 1) throw std::runtime_error("a corrupt image");
      const auto loss = scores.pow(2).mean();
      loss.backward();
      const bool loss_is_fine = std::isfinite(loss.item<float>());
      if (loss_is_fine) {
        optimizer.step();
      } else {
        optimizer.skip_step();
      }
      optimizer.zero_grad();
      steps++;
    } catch (const std::exception& error) {
      tessera::recover(*model);  // collective: drops all gradients and synchronises the ranks again
    }
  }
  if (world.rank() == 0) std::printf("%d of 6 batches\n", steps);
}
