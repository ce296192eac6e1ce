// Several backward passes with one reduction: tessera launch -n 2 accumulation
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <optional>

using namespace tessera;

constexpr int kPasses = 4, kSteps = 20;

int main() {
  const auto world = init();
  torch::manual_seed(1);
  models::Mlp model(models::MlpOptions{.width = 64, .layers = 4, .classes = 4});
  fully_shard(model, {}, wrap_classes({"Linear"}));
  optim::AdamW optimizer(parameters(*model), {.lr = 3e-3});

  torch::manual_seed(2 + world.rank());  // different batches on every rank
  double last = 0;
  for (int step = 0; step < kSteps; step++) {
    for (int pass = 1; pass <= kPasses; pass++) {
      const auto x = torch::randn({16, 64});
      std::optional<NoSync> local;
      if (pass < kPasses) local.emplace(no_sync(*model));  // adds up on this rank; the last pass reduces the sum
      const auto loss = torch::cross_entropy_loss(model(x), x.slice(1, 0, 4).argmax(1));
      (loss / kPasses).backward();
      last = loss.item<double>();
    }
    clip_grad_value(parameters(*model), 0.1);
    optimizer.step();
    optimizer.zero_grad();
  }
  const auto reductions = static_cast<int>(counters(*model).reductions);
  if (world.rank() == 0) std::printf("%d passes, %d reductions of 5 units, loss %.3f\n", kPasses * kSteps, reductions, last);
}
