// A training loop with what most of them need: micro-batches, clipping, a schedule, groups of parameters, evaluation, metrics, a bar.
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

namespace {

using namespace tessera;

constexpr int64_t kSteps = 240, kMicroBatches = 2, kRows = 32, kWidth = 64, kClasses = 8;

/// Rows whose class follows from their values.
data::Samples some_rows(uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  auto inputs = torch::randn({kRows, kWidth}, generator);
  auto targets = inputs.slice(1, 0, kClasses).argmax(1);
  return {.inputs = inputs, .targets = targets};
}

double evaluate(models::Mlp& model, const Communicator& world) {
  const torch::NoGradGuard no_grad;
  model->eval();
  train::Mean accuracy;
  for (uint64_t batch = 0; batch < 4; batch++) {
    const auto rows = some_rows(1'000'000 + 4 * static_cast<uint64_t>(world.rank()) + batch);
    accuracy.add(train::accuracy(model(rows.inputs), rows.targets), rows.size());
  }
  model->train();
  return accuracy.value(world);  // over the samples of all ranks
}

}  // namespace

int main() {
  const auto world = init();
  torch::manual_seed(1);
  models::Mlp model(models::MlpOptions{.width = kWidth, .layers = 4, .classes = kClasses});
  for (auto& block : *model->blocks) fully_shard(block, {.mesh = world});
  fully_shard(model, {.mesh = world});

  // Matrices decay, biases do not. The groups may split a unit.
  std::vector<torch::Tensor> matrices, biases;
  for (const auto& parameter : model->parameters()) (parameter.dim() > 1 ? matrices : biases).push_back(parameter);
  optim::AdamW optimizer({{.parameters = matrices}, {.parameters = biases, .weight_decay = 0}}, {.lr = 3e-3, .weight_decay = 0.1});
  const optim::LearningRate rate{.base = 3e-3, .shape = optim::LearningRate::Shape::Cosine, .warmup = 10, .steps = kSteps};

  train::JsonlReporter metrics("metrics.jsonl", {.first_step = 1, .rank = world.rank()});
  train::Progress progress({.title = "training", .steps = kSteps, .line_every = 80, .rank = world.rank()});
  for (int64_t step = 1; step <= kSteps; step++) {
    train::Mean loss;
    for (int64_t micro = 0; micro < kMicroBatches; micro++) {
      const auto rows = some_rows(static_cast<uint64_t>((step * kMicroBatches + micro) * world.size() + world.rank()));
      const auto own = torch::cross_entropy_loss(model(rows.inputs), rows.targets);
      (own / kMicroBatches).backward();  // gradients add up in the shards
      loss.add(own.detach(), rows.size());
    }
    const auto norm = optimizer.clip_grad_norm(1.0).item<double>();  // of the mean gradient, over all ranks
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
    if (step % 80 == 0) {
      const auto accuracy = evaluate(model, world);
      progress.say(std::to_string(static_cast<int>(100 * accuracy)) + " % right after step " + std::to_string(step));
      metrics.write(step, {{"accuracy", accuracy}});
    }
  }
}
