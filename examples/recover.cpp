// All ranks leave out a batch that fails on one of them: tessera launch -n 2 recover
// One batch ends in an exception, another has NaN in it.
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
  tessera::fully_shard(model);
  tessera::optim::SGD optimizer(model->parameters(), {.lr = 0.1});

  int steps = 0;
  for (int batch = 0; batch < 6; batch++) {
    const bool is_last_rank = world.rank() == world.size() - 1;
    try {
      auto x = torch::randn({4, 32});
      if (batch == 4 && is_last_rank) x[0][0] = std::nan("");
      const auto scores = model(x);
      if (batch == 2 && is_last_rank) throw std::runtime_error("a corrupt image");
      scores.pow(2).mean().backward();
      if (std::isfinite(optimizer.clip_grad_norm(1.0).item<double>())) {  // the same on all ranks
        optimizer.step();
        steps++;
      } else {
        optimizer.skip_step();  // with torch::optim: tessera::skip_step(*model)
      }
      optimizer.zero_grad();
    } catch (const std::exception& error) {
      tessera::recover(*model);  // collective: drops all gradients and synchronises the ranks again
    }
  }
  if (world.rank() == 0) std::printf("%d of 6 batches\n", steps);
}
