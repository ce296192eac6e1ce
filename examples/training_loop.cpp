// Micro-batches, clipping, a schedule, groups of parameters, metrics and a bar: tessera launch -n 2 training_loop
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

using namespace tessera;

constexpr int64_t kSteps = 240, kMicroBatches = 2;

int main() {
  const auto world = init();
  torch::manual_seed(1);
  models::Mlp model(models::MlpOptions{.width = 64, .layers = 4, .classes = 8});
  for (auto& block : *model->blocks) fully_shard(block);
  fully_shard(model);

  // Matrices decay, biases do not. The groups may split a unit.
  std::vector<torch::Tensor> matrices, biases;
  for (const auto& parameter : model->parameters()) (parameter.dim() > 1 ? matrices : biases).push_back(parameter);
  optim::AdamW optimizer({{.parameters = matrices}, {.parameters = biases, .weight_decay = 0}}, {.lr = 3e-3, .weight_decay = 0.1});
  const optim::LearningRate rate{.base = 3e-3, .shape = optim::LearningRate::Shape::Cosine, .warmup = 10, .steps = kSteps};

  train::JsonlReporter metrics("metrics.jsonl", {.first_step = 1, .rank = world.rank()});
  train::Progress progress({.title = "training", .steps = kSteps, .line_every = 80, .rank = world.rank()});
  torch::manual_seed(2 + world.rank());  // different batches on every rank
  for (int64_t step = 1; step <= kSteps; step++) {
    train::Mean loss;
    for (int64_t micro = 0; micro < kMicroBatches; micro++) {
      const auto x = torch::randn({32, 64});
      const auto own = torch::cross_entropy_loss(model(x), x.slice(1, 0, 8).argmax(1));
      (own / kMicroBatches).backward();  // gradients add up in the shards
      loss.add(own, x.size(0));
    }
    const auto norm = optimizer.clip_grad_norm(1.0).item<double>();  // the norm of the gradient averaged over all ranks
    optimizer.set_lr(rate.at(step - 1));
    if (std::isfinite(norm)) {
      optimizer.step();
    } else {
      optimizer.skip_step();
    }
    optimizer.zero_grad();
    if (step % 10 == 0) {
      const auto mean = loss.value(world);  // all ranks call it
      progress.update(step, {{"loss", mean}});
      metrics.write(step, {{"loss", mean}, {"lr", optimizer.lr()}, {"grad_norm", norm}});
    }
  }
}
