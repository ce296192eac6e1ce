// A training loop over a Trainer: what is sharded, and how, comes from the configuration.
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

int main() {
  Trainer trainer;
  torch::manual_seed(1);
  const auto inputs = torch::randn({512, 32});
  const auto targets = inputs.slice(1, 0, 4).argmax(1);
  data::Loader loader(
      data::Sampler({.size = 512, .global_batch = 32, .local_ranks = trainer.world().local_ranks(), .ranks = trainer.num_processes()}),
      [&](std::span<const int64_t> numbers) { return data::pick({inputs, targets}, numbers); });

  auto model = trainer.make_model([] { return models::Mlp(models::MlpOptions{.width = 32, .layers = 3, .classes = 4}); });
  trainer.prepare(model, loader);
  optim::AdamW optimizer(parameters(*model), {.lr = 1e-2});
  trainer.prepare(optimizer, optim::LearningRate{.base = 1e-2, .warmup = 10});

  for (int epoch = 0; epoch < 4; epoch++) {
    for (const auto& batch : loader) {
      const auto accumulation = trainer.accumulate();
      trainer.backward(torch::cross_entropy_loss(model(batch.inputs), batch.targets));
      trainer.clip_grad_norm(1.0);
      trainer.step();
    }
  }
  trainer.save_state("ckpt");

  train::Mean accuracy;
  for (const auto& batch : loader) {
    const torch::NoGradGuard no_grad;
    const auto hits = trainer.gather_for_metrics(model(batch.inputs).argmax(1).eq(batch.targets), batch);
    accuracy.add(hits.to(torch::kFloat).mean(), hits.size(0));
  }
  trainer.print("accuracy " + std::to_string(static_cast<int>(100 * accuracy.value())) + " % after " + std::to_string(trainer.steps()) +
                " steps");
}
