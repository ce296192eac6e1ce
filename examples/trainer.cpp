// A loop over a Trainer, which shards as the configuration says, and resumes: tessera launch -n 2 trainer [EPOCHS]
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdlib>

using namespace tessera;

int main(int argc, char** argv) {
  const int64_t epochs = argc > 1 ? std::atoll(argv[1]) : 4;
  if (epochs < 1) throw UsageError("usage: trainer [EPOCHS]");
  Trainer trainer({.log_with = {"metrics.jsonl"}});
  trainer.set_seed(1);
  const auto inputs = torch::randn({540, 32});
  const auto targets = inputs.slice(1, 0, 4).argmax(1);
  const auto make_loader = [&](int64_t first, int64_t count, data::Order order) {
    const data::Samples part{.inputs = inputs.narrow(0, first, count), .targets = targets.narrow(0, first, count)};
    const int64_t batch = 16 * trainer.num_processes();
    return data::Loader(trainer.make_sampler({.size = count, .global_batch = batch, .order = order, .tail = data::Tail::Fill}),
                        [part](std::span<const int64_t> numbers) { return data::pick(part, numbers); });
  };
  auto loader = make_loader(0, 480, data::Order::Shuffled), test = make_loader(480, 60, data::Order::AsStored);

  const models::MlpOptions shape{.width = 32, .layers = 3, .classes = 4};
  auto model = trainer.make_model([&] { return models::Mlp(shape); });
  trainer.prepare(model, loader);
  optim::AdamW optimizer(parameters(*model), {.lr = 1e-2});
  trainer.prepare(optimizer, optim::LearningRate{.base = 1e-2, .warmup = 10});

  train::Run run(trainer, loader,
                 {
                     .epochs = epochs,
                     .prefix = "run/rows",
                     .resume = true,
                     .report_every = 10,
                 });
  while (run.next_epoch()) {
    for (const auto& batch : run.batches()) {
      const auto accumulation = trainer.accumulate();
      const auto loss = torch::cross_entropy_loss(model(batch.inputs), batch.targets);
      trainer.backward(loss);
      trainer.clip_grad_norm(1.0);
      trainer.step();
      run.report({{"loss", loss}});
    }
  }

  int64_t right = 0, seen = 0;
  for (const auto& batch : trainer.evaluation(model, test)) {
    const auto own = model(batch.inputs).argmax(1);
    const auto [answers, labels] = trainer.gather_for_metrics({own, batch.targets}, batch);
    right += answers.eq(labels).sum().item<int64_t>();
    seen += answers.size(0);
  }
  trainer.log({{"accuracy", static_cast<double>(right) / static_cast<double>(seen)}});
  trainer.print(std::to_string(right) + " of " + std::to_string(seen) + " right after " + std::to_string(trainer.steps()) + " steps");
  trainer.save_model(model, "model");
  trainer.end_training();
}
